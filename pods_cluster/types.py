"""The data that passes between stages, in the order of a rollout's life.

Nothing here imports torch, ray or vllm: a stage can be tested with these values alone. Tokens and texts stay with the
worker that made them; only the numbers of a `GroupShard` cross the network to the selector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32


class GroupId(NamedTuple):
    """Identifies one group of rollouts: dataset epoch, row in the dataset, attempt at that row (0 first)."""

    epoch: int
    row: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.row}.{self.attempt}"


class FinishReason(StrEnum):
    """The reason why a rollout ended: its own end token (or its environment), a limit of tokens, turns or seconds, or an
    abort from outside."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Fate(StrEnum):
    """The end of a group. Every group has exactly one fate, counted once."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"
    TOO_FEW_VALID = "too_few_valid"
    STALE = "stale"
    LOST = "lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, rendered: `token_ids` for the engine, everything else for the rewards."""

    epoch: int
    row: int
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of a request. A completion ends at a token of `stop_token_ids`, or with the token that completes one of
    `stop_strings`.

    `seed` is the run's. An engine derives one random stream for each rollout from (seed, group id, index), so that the
    same rollout can be made again on any worker.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Asks an engine for one rollout, or for its next turn. Requests are answered one by one, in any order.

    In a later turn `prompt_ids` ends with `start` tokens of the rollout itself, its own and the environment's.
    """

    group: GroupId
    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    start: int = 0

    @property
    def key(self) -> str:
        """`<group>/<index>`, unique in a run."""
        return f"{self.group}/{self.index}"


@dataclass(slots=True)
class Rollout:
    """A finished completion as the engine made it.

    `token_ids` ([tokens], the end token included when it was sampled) are those that the engine sampled. `logprobs`
    ([tokens], natural logarithm) are their log-probabilities under the distribution that was sampled from (temperature
    applied), None where they are left to the learner. `first_version` and `last_version` are the weight versions of the
    first and last token; `spans` lists all versions in order as (version, tokens sampled under it), empty where the
    engine does not know. `seconds` is the time from the request to the last token.

    A rollout of several turns holds the tokens of its environment too: `environment` are their places [start, stop) in
    `token_ids`. The model reads them and never trains on them; their `logprobs` are NaN, and `spans` leaves them out.
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
    reward_errors: tuple[str, ...] = ()
    """The failures of rewards that gave no number, one text each: reward, kind and message."""
    seconds: float = 0.0
    spans: tuple[tuple[int, int], ...] = ()
    environment: tuple[tuple[int, int], ...] = ()
    turns: int = 1

    @property
    def key(self) -> str:
        """`<group>/<index>`, unique in a run."""
        return f"{self.group}/{self.index}"

    @property
    def environment_tokens(self) -> int:
        """Tokens of `token_ids` that an environment wrote."""
        return sum(stop - start for start, stop in self.environment)

    @property
    def sampled_tokens(self) -> int:
        """Tokens of `token_ids` that the model sampled."""
        return len(self.token_ids) - self.environment_tokens

    def sampled(self) -> Bool[np.ndarray, " tokens"]:
        """Whether each of `token_ids` was sampled by the model."""
        mask = np.ones(len(self.token_ids), np.bool_)
        for start, stop in self.environment:
            mask[start:stop] = False
        return mask

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.token_ids)


def spans_of(updates: Sequence[tuple[int, int]], version: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """Compute `Rollout.spans` of a completion of `tokens` tokens whose last ones were sampled under `version`.

    `updates` are the weight updates that it met: (version until then, tokens sampled by then).
    """
    spans, start = [], 0
    for under, stop in (*updates, (version, tokens)):
        if stop > start:
            spans.append((under, stop - start))
        start = stop
    return tuple(spans)


class Locator(NamedTuple):
    """Says where a finished rollout is: the worker that holds it, its group, and its index in the group."""

    worker: str
    group: GroupId
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  (shadows tuple.index, which nothing here calls)


@dataclass(slots=True)
class Selection:
    """The m rollouts kept of a group's n, in rising index. The arrays are parallel to `locators`.

    `lengths` are the sampled tokens, which are trained on; `environment_tokens` lie among them (None: none do).

    `group_mean` and `group_std` (sample standard deviation) are over the rewards of all `group_valid` valid rollouts of
    the group, for `advantage.scope: group`. `settled`: the group was stopped early.
    """

    group: GroupId
    locators: list[Locator]
    rewards: Float64[np.ndarray, " kept"]
    lengths: Int32[np.ndarray, " kept"]
    prompt_tokens: int
    first_versions: Int32[np.ndarray, " kept"]
    group_mean: float
    group_std: float
    group_valid: int
    settled: bool = False
    weights: Float64[np.ndarray, " kept"] | None = None
    """Weight of each rollout in the loss beside the others of its group, where the rule weights; None: all alike."""
    environment_tokens: Int32[np.ndarray, " kept"] | None = None

    def __len__(self) -> int:
        return len(self.locators)
