"""Shards as workers send them, for the tests of the selector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pods_cluster.group_shard import GroupShard
from pods_cluster.types import GroupId


def shard(
    group: GroupId,
    rewards: Sequence[float],
    *,
    worker: str = "run/generator/0",
    indices: Sequence[int] | None = None,
    size: int | None = None,
    version: int | Sequence[int] = 0,
    lengths: Sequence[int] | int = 10,
    truncated: Sequence[bool] | bool = False,
    aborted: Sequence[bool] | bool = False,
    parts: dict[str, Sequence[float]] | None = None,
    lost: int = 0,
    environment: Sequence[int] | None = None,
) -> GroupShard:
    n = len(rewards)
    at = np.arange(n) if indices is None else np.asarray(indices)

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype=dtype), (n,)).copy()

    return GroupShard(
        group=group,
        worker=worker,
        size=n + lost if size is None else size,
        prompt_tokens=7,
        indices=at.astype(np.int32),
        rewards=np.asarray(rewards, dtype=np.float64),
        lengths=column(lengths, np.int32),
        first_versions=column(version, np.int32),
        last_versions=column(version, np.int32),
        truncated=column(truncated, np.bool_),
        aborted=column(aborted, np.bool_),
        parts={name: np.asarray(values, dtype=np.float64) for name, values in (parts or {}).items()},
        lost=lost,
        environment_tokens=None if environment is None else column(environment, np.int32),
    )
