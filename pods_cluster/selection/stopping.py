"""Stopping a group early: what the selector asks of the generators, from the rewards that it has seen (pure).

`abort`: once the finished rollouts settle the selection, the unfinished ones are ended where they are. `waves`: the
rollouts are issued in portions; when a portion has come back whole, the next one follows, or none if the selection is
settled by then. The conditions themselves are in `settle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pods_cluster.selection.settle import SettledCondition, after_wave, check_range, is_settled, plan_waves
from pods_cluster.types import GroupId

_portions = lru_cache(maxsize=256)(plan_waves)


@dataclass(frozen=True, slots=True)
class Settling:
    """How groups are stopped early. `low` and `high` are the ends of the range of the total reward.

    Raises ValueError for a range that is not finite, or a tolerance of half of it or more.
    """

    mode: Literal["abort", "waves"]
    low: float
    high: float
    waves: int = 4
    tolerance: float = 0.0
    condition: SettledCondition = is_settled

    def __post_init__(self) -> None:
        check_range(self.low, self.high, self.tolerance)

    def first(self, size: int, m: int) -> int:
        """How many rollouts of a group of `size` are issued at once."""
        return _portions(size, m, self.waves)[0] if self.mode == "waves" and m <= size else size

    def settled(self, rewards: NDArray[np.float64], m: int) -> bool:
        """Whether these rewards (NaN where there is none) settle the selection of m."""
        return bool(self.condition(rewards, m, self.low, self.high, self.tolerance))

    def following(self, size: int, issued: int, rewards: NDArray[np.float64], m: int) -> int:
        """Size of the portion after the first `issued` rollouts, which have all come back; 0: stop here."""
        return after_wave(
            _portions(size, m, self.waves),
            issued,
            rewards,
            m,
            self.low,
            self.high,
            tolerance=self.tolerance,
            condition=self.condition,
        ).issue


class Issue(NamedTuple):
    """Make rollouts start … stop - 1 of a group; those before were `length` tokens long in the mean (NaN: unknown)."""

    group: GroupId
    start: int
    stop: int
    length: float


@dataclass(slots=True)
class Orders:
    """What the generators are to do about groups that are out: `issue` more rollouts, and `abort` what is unfinished
    of groups whose finished rollouts stay."""

    issue: list[Issue] = field(default_factory=list)
    abort: list[GroupId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.issue or self.abort)
