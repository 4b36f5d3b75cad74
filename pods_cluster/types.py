"""The data that passes between stages, in the order in which a rollout lives.

Nothing here imports torch, ray or vllm: a stage can be tested with these values alone. Token texts stay
where they were made: what crosses the network to the selector are the numbers of a `GroupShard`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class GroupId(NamedTuple):
    """Names one group of rollouts: dataset epoch, row in the dataset, attempt at that row (0 first)."""

    epoch: int
    row: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.row}.{self.attempt}"


class FinishReason(StrEnum):
    """Why a rollout ended: its own end token, the token limit, or an abort from outside."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Fate(StrEnum):
    """What became of a group. Every group has exactly one, counted once."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"
    TOO_FEW_VALID = "too_few_valid"
    STALE = "stale"
    LOST = "lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, rendered: what the engine reads (`token_ids`) and what the rewards read."""

    epoch: int
    row: int
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples. For training rollouts only `temperature` may differ from the model's own distribution.

    `seed` is the run's; an engine derives one stream a rollout from (seed, group id, index) so that the same
    rollout can be made again on any worker.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to make: the engine answers each request alone, in any order."""

    group: GroupId
    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams

    @property
    def key(self) -> str:
        return f"{self.group}/{self.index}"


@dataclass(slots=True)
class Rollout:
    """A finished completion as the engine made it.

    `token_ids` are the engine's own ([T], end token included when it was sampled); `logprobs` ([T], natural log)
    are those of the sampled tokens under the distribution that was sampled from (temperature applied), or None when
    they are left to the learner. `first_version` and `last_version` are the weight versions of its first and last token;
    `spans` are all of them in order, (version, tokens sampled under it), where the engine knows: () where it does not.
    """

    group: GroupId
    index: int
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    first_version: int
    last_version: int
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.group}/{self.index}"

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


def spans_of(updates: Sequence[tuple[int, int]], version: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """`Rollout.spans` of a completion of `tokens`, its last ones under `version`, that met `updates`: (version until
    then, tokens that were there)."""
    spans, start = [], 0
    for under, stop in (*updates, (version, tokens)):
        if stop > start:
            spans.append((under, stop - start))
        start = stop
    return tuple(spans)


@dataclass(slots=True)
class GroupShard:
    """Numbers of some finished, scored rollouts of one group, all in the memory of one worker.

    A group is complete when its shards account for `size` rollouts. Arrays are parallel, one entry a rollout:
    `indices` int32, `rewards` float64 (NaN = no valid reward), `lengths` int32 (completion tokens), `prompt_tokens` of
    the group, `first_versions`/`last_versions` int32, `truncated`/`aborted` bool. `lost` counts rollouts that will
    never come (their engine died). `parts` holds the reward components by name (float64, NaN = missing).
    """

    group: GroupId
    worker: str
    size: int
    prompt_tokens: int
    indices: NDArray[np.int32]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int32]
    first_versions: NDArray[np.int32]
    last_versions: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    aborted: NDArray[np.bool_]
    parts: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    lost: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        # One buffer in place of nine arrays: pickling those would cost the selector more than selecting the group.
        columns = [getattr(self, name) for name, _ in _SHARD_COLUMNS]
        n = len(self.indices)
        head = (tuple(self.group), self.worker, self.size, self.prompt_tokens, self.lost)
        if any(
            len(values) != n for values in (*columns, *self.parts.values())
        ):  # contradicts itself: told by who reads it
            return _shard_of_columns, (*head, *columns, self.parts)
        # widest first, so that every column is aligned
        buffers = [np.asarray(values, dtype=np.float64).tobytes() for values in self.parts.values()]
        buffers += [
            np.asarray(values, dtype=kind).tobytes() for values, (_, kind) in zip(columns, _SHARD_COLUMNS, strict=True)
        ]
        return _shard_of_buffer, (*head, n, tuple(self.parts), b"".join(buffers))


_SHARD_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("rewards", np.float64),
    ("indices", np.int32),
    ("lengths", np.int32),
    ("first_versions", np.int32),
    ("last_versions", np.int32),
    ("truncated", np.bool_),
    ("aborted", np.bool_),
)
_SHARD_DTYPES = tuple((name, np.dtype(kind)) for name, kind in _SHARD_COLUMNS)


def _shard_of_columns(
    group: tuple[int, ...], worker: str, size: int, prompt_tokens: int, lost: int, *columns: Any
) -> GroupShard:
    *arrays, parts = columns
    named = dict(zip((name for name, _ in _SHARD_COLUMNS), arrays, strict=True))
    return GroupShard(GroupId(*group), worker, size, prompt_tokens, **named, parts=parts, lost=lost)


def _shard_of_buffer(
    group: tuple[int, ...],
    worker: str,
    size: int,
    prompt_tokens: int,
    lost: int,
    n: int,
    names: tuple[str, ...],
    data: bytes,
) -> GroupShard:
    """The shard again; its arrays are read-only views of the message."""
    offset = 0
    parts: dict[str, Any] = {}
    for name in names:
        parts[name] = np.frombuffer(data, np.float64, n, offset)
        offset += 8 * n
    columns: dict[str, Any] = {}
    for name, kind in _SHARD_DTYPES:
        columns[name] = np.frombuffer(data, kind, n, offset)
        offset += kind.itemsize * n
    return GroupShard(GroupId(*group), worker, size, prompt_tokens, **columns, parts=parts, lost=lost)


class Locator(NamedTuple):
    """Where a finished rollout lies: the worker that holds it, its group and its index there."""

    worker: str
    group: GroupId
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  (shadows tuple.index, which nothing here calls)


@dataclass(slots=True)
class Selection:
    """The m kept of a group's n. Parallel arrays over the kept rollouts, in rising index.

    `group_mean` and `group_std` (sample) are over all valid rollouts of the group, for `advantage.scope: group`.
    """

    group: GroupId
    locators: list[Locator]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int32]
    prompt_tokens: int
    first_versions: NDArray[np.int32]
    group_mean: float
    group_std: float
    group_valid: int
    settled: bool = False

    def __len__(self) -> int:
        return len(self.locators)
