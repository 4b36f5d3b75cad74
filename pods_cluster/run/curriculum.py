"""A curriculum by past pass rate: prompts that are solved about as often as a target says come in each epoch, others are
skipped by a chance before any rollout is made (pure).

A prompt with the pass rate r comes with the chance

    max( floor, exp( -2 KL(target || r) ) ),      KL between two Bernoulli distributions

which at target 0.5 is 4 r (1 - r): the variance of a binary reward as a share of its greatest, which a group's signal grows
with (online difficulty filtering, arXiv 2504.03380). Prompts without a past come always, and each does in one of
MOST_SKIPPED + 1 epochs in a row: none is lost for ever. The decision is a function of (run's seed, epoch, row, r), so that a
resumed run makes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from pods_cluster.config import Config
from pods_cluster.run.evaluation import accuracy_reward
from pods_cluster.scoring.reward_registry import declared_range
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.selection.rules import group_rng
from pods_cluster.types import GroupId

MOST_SKIPPED = 4
"""Epochs in a row in which a prompt may be skipped."""
WEIGHT = 0.5
"""Weight of the newest group in a pass rate; those before it share the rest."""
_ATTEMPT = 2**62 + 1
"""In place of an attempt: a random stream that no group has."""


def chance(rate: float, target: float, floor: float) -> float:
    """Chance that a prompt of this pass rate comes in an epoch; 1 at the target."""
    if not 0 < rate < 1:  # the divergence is infinite
        return floor
    divergence = target * math.log(target / rate) + (1 - target) * math.log((1 - target) / (1 - rate))
    return max(floor, math.exp(-2 * divergence))


def pass_rate(config: Config) -> Callable[[GroupStats], float]:
    """A function that gives the pass rate of a group: the mean of the first reward with a positive weight, as a share of its
    declared range ([0, 1] without one); NaN where no rollout has a value of it."""
    reward = accuracy_reward(config)
    return share_of(reward.key, declared_range(reward) or (0.0, 1.0))


def share_of(reward: str, bounds: tuple[float, float]) -> Callable[[GroupStats], float]:
    """A function that gives the mean of a reward over a group, 0 and 1 being the ends of its range."""
    low, high = bounds

    def rate(stats: GroupStats) -> float:
        mean = stats.parts_mean.get(reward, math.nan)
        return mean if math.isnan(mean) else min(1.0, max(0.0, (mean - low) / (high - low)))

    return rate


class Curriculum:
    """The past pass rates of prompts, by row of the dataset, and whether a prompt is left out in an epoch.

    A pass rate is that of a group, `rate`, averaged over groups (`WEIGHT`).
    """

    def __init__(self, target: float, floor: float, seed: int, rate: Callable[[GroupStats], float]) -> None:
        self.target, self.floor = target, floor
        self._seed, self._rate = seed, rate
        self._rates: dict[int, tuple[float, int]] = {}  # row -> (pass rate, epoch of the last group)

    @classmethod
    def of(cls, config: Config) -> Curriculum | None:
        """The curriculum of a run's configuration, if it has one."""
        wanted = config.data.curriculum
        return wanted and cls(wanted.target, wanted.floor, config.run.seed, pass_rate(config))

    def saw(self, epoch: int, row: int, stats: GroupStats) -> None:
        """A group of this row was complete. One without a valid value of the reward says nothing."""
        newest = self._rate(stats)
        rate, last = self._rates.get(row, (math.nan, -1))
        if math.isnan(newest) or last >= epoch:  # a step that was broken off is made again: its groups count once
            return
        self._rates[row] = newest if math.isnan(rate) else rate + WEIGHT * (newest - rate), epoch

    def skips(self, epoch: int, row: int) -> bool:
        """Whether the row is left out in this epoch."""
        if row not in self._rates:
            return False
        rate, last = self._rates[row]
        if not last < epoch <= last + MOST_SKIPPED:
            return False
        drawn = float(group_rng(self._seed, GroupId(epoch, row, _ATTEMPT)).random())
        return drawn >= chance(rate, self.target, self.floor)

    def state(self) -> list[list[float]]:
        """[row, pass rate, epoch of the last group] of each row that has a past, for a checkpoint."""
        return [[row, rate, epoch] for row, (rate, epoch) in sorted(self._rates.items())]

    def restore(self, state: Iterable[Sequence[float]]) -> None:
        """Go on with what `state` returned."""
        self._rates = {int(row): (rate, int(epoch)) for row, rate, epoch in state}
