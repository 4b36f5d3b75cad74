"""Early stopping of a group: the settings, what the generators are told, and what an abort saves (pure).

With `selector.settle: abort` the unfinished rollouts of a group are ended once the finished ones settle its selection.
With `waves` the rollouts are issued in portions: when one has come back whole, the next follows, or none if the
selection is settled by then. The condition itself is in `settle`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from pods_cluster.config import SelectorConfig
from pods_cluster.selection.settle import SettledCondition, after_wave, check_range, is_settled, plan_waves
from pods_cluster.types import GroupId

_wave_sizes = lru_cache(maxsize=256)(plan_waves)


@dataclass(frozen=True, slots=True)
class Settling:
    """The early stopping of groups, where `selector.settle` is `abort` or `waves`.

    `config` is the run's `selector` section; `low` and `high` are the ends of the range of the total reward;
    `condition` is the settled condition of the rule. Raises ValueError for a range that is not finite, or a
    `selector.tolerance` of half of it or more.
    """

    config: SelectorConfig
    low: float
    high: float
    condition: SettledCondition = is_settled

    def __post_init__(self) -> None:
        check_range(self.low, self.high, self.config.tolerance)

    def first_wave(self, size: int) -> int:
        """Return how many rollouts of a group of `size` are issued first."""
        if self.config.settle != "waves" or self.config.keep > size:
            return size
        return _wave_sizes(size, self.config.keep, self.config.waves)[0]

    def is_settled(self, rewards: Float64[np.ndarray, " rollouts"]) -> bool:
        """Whether these rewards (NaN where there is none) settle the selection."""
        return bool(self.condition(rewards, self.config.keep, self.low, self.high, self.config.tolerance))

    def next_wave(self, size: int, issued: int, rewards: Float64[np.ndarray, " issued"]) -> int:
        """Return the size of the wave after the first `issued` rollouts of a group; 0: stop here.

        All of them have come back or failed; `rewards` are theirs, NaN where there is none.
        """
        return after_wave(
            _wave_sizes(size, self.config.keep, self.config.waves),
            issued,
            rewards,
            self.config.keep,
            self.low,
            self.high,
            tolerance=self.config.tolerance,
            condition=self.condition,
        ).issue


class Wave(NamedTuple):
    """The next portion of a group: rollouts `start` to `stop` - 1.

    `mean_length` is the mean length of the group's earlier rollouts in tokens, NaN while there are none.
    """

    group: GroupId
    start: int
    stop: int
    mean_length: float


@dataclass(slots=True)
class Instructions:
    """Instructions to the generators: generate more `waves`, and `abort` the unfinished rollouts of groups.

    Finished rollouts of an aborted group stay with their workers.
    """

    waves: list[Wave] = field(default_factory=list)
    abort: list[GroupId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.waves or self.abort)


REMEMBERED_GROUPS = 64
"""Groups whose lengths are remembered for `RemainingLengths`; the newest replace the oldest."""


class RemainingLengths:
    """Estimates how many tokens an aborted rollout would still have generated.

    A rollout aborted after t tokens would have generated E[L - t | L > t] more, over the lengths L of rollouts of
    groups that ended by themselves. Those groups did not settle, so the estimate is as good as their lengths are like
    those of groups that did. Where prompts differ in length it is too high: rollouts longer than t are mostly of long
    groups, whichever group was aborted (34 % of the tokens estimated where 27 % were saved, `benchmarks.overlap`).
    Rollouts that were never issued (t = 0) do not come here.
    """

    def __init__(self) -> None:
        self._groups: deque[Int32[np.ndarray, " rollouts"]] = deque(maxlen=REMEMBERED_GROUPS)
        self._sorted: Int64[np.ndarray, " lengths"] | None = None
        self._tail_sums: Int64[np.ndarray, " positions"] | None = None  # sum of `_sorted` from each on

    def record(self, lengths: Int32[np.ndarray, " rollouts"]) -> None:
        """Remember all lengths (in tokens) of a group that ended by itself."""
        if len(lengths):
            self._groups.append(lengths)
            self._sorted = None

    def expected_tokens(self, generated: Int32[np.ndarray, " aborted"]) -> float | None:
        """Estimate the tokens that rollouts aborted after `generated` tokens would still have generated, summed.

        A rollout longer than any remembered counts as finished. None while no group is remembered.
        """
        if not self._groups:
            return None
        if self._sorted is None or self._tail_sums is None:
            self._sorted = np.sort(np.concatenate(list(self._groups)).astype(np.int64))
            self._tail_sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        first_longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - first_longer
        longer = count > 0
        rest = self._tail_sums[first_longer[longer]] / count[longer] - generated[longer]
        return float(rest.sum())
