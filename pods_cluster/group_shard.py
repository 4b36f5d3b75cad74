"""The numbers of finished rollouts as a worker reports them to the selector, packed for the way (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int32

from pods_cluster.types import GroupId


@dataclass(slots=True)
class GroupShard:
    """The numbers of some finished, scored rollouts of one group, all in the memory of one worker.

    A group is complete when its shards account for `size` rollouts. `lengths` are sampled tokens, `environment_tokens`
    those that environments wrote beside them (None: none), `prompt_tokens` those of the group's prompt. `rewards` and the
    reward components in `parts` (by name) are NaN where there is no valid value. `lost` counts rollouts that will never
    come because their engine died.
    """

    group: GroupId
    worker: str
    size: int
    prompt_tokens: int
    indices: Int32[np.ndarray, " rollouts"]
    rewards: Float64[np.ndarray, " rollouts"]
    lengths: Int32[np.ndarray, " rollouts"]
    first_versions: Int32[np.ndarray, " rollouts"]
    last_versions: Int32[np.ndarray, " rollouts"]
    truncated: Bool[np.ndarray, " rollouts"]
    aborted: Bool[np.ndarray, " rollouts"]
    parts: dict[str, Float64[np.ndarray, " rollouts"]] = field(default_factory=dict)
    lost: int = 0
    environment_tokens: Int32[np.ndarray, " rollouts"] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        # One buffer in place of nine arrays: pickling those would cost the selector more than selecting the group.
        columns = [getattr(self, name) for name, _ in _SHARD_COLUMNS]
        n = len(self.indices)
        head = (tuple(self.group), self.worker, self.size, self.prompt_tokens, self.lost, self.environment_tokens)
        if any(len(values) != n for values in (*columns, *self.parts.values())):
            # The shard contradicts itself; the selector reports it, so that it must arrive as it is.
            named = dict(zip((name for name, _ in _SHARD_COLUMNS), columns, strict=True))
            return _shard, (head, named, self.parts)
        # widest first, so that every column is aligned
        buffers = [np.asarray(values, dtype=np.float64).tobytes() for values in self.parts.values()]
        buffers += [
            np.asarray(values, dtype=kind).tobytes() for values, (_, kind) in zip(columns, _SHARD_COLUMNS, strict=True)
        ]
        return _shard_of_buffer, (head, n, tuple(self.parts), b"".join(buffers))


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


def _shard(head: tuple[Any, ...], columns: dict[str, Any], parts: dict[str, Any]) -> GroupShard:
    group, worker, size, prompt_tokens, lost, environment = head
    return GroupShard(
        GroupId(*group), worker, size, prompt_tokens, **columns, parts=parts, lost=lost, environment_tokens=environment
    )


def _shard_of_buffer(head: tuple[Any, ...], n: int, names: tuple[str, ...], data: bytes) -> GroupShard:
    """Unpack a shard; its arrays are read-only views of the message."""
    offset = 0
    parts: dict[str, Any] = {}
    for name in names:
        parts[name] = np.frombuffer(data, np.float64, n, offset)
        offset += 8 * n
    columns: dict[str, Any] = {}
    for name, kind in _SHARD_DTYPES:
        columns[name] = np.frombuffer(data, kind, n, offset)
        offset += kind.itemsize * n
    return _shard(head, columns, parts)
