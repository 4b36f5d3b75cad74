"""Which prompts taught nothing of late, and are skipped before any rollout is made (GRESO, arXiv 2506.02177; pure).

A prompt whose last z groups in a row had no signal is likely to have none again. It is skipped with the chance 1 - p^z, p
being `data.revisit` (the paper's p_e), and never in more than MOST_SKIPPED epochs in a row: none is lost for ever.

With `data.revisit_target`, the wanted share of groups without signal, p begins at `data.revisit` and adapts as in the paper,
apart for easy prompts (answered right) and hard ones: after each step it falls by STEP where its kind has its part of that
share among the step's groups, or more, and else rises. Easy ones have a third of the share, hard ones the rest.

The decision is a function of (run's seed, epoch, row, z, p), so that a resumed run makes the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from pods_cluster.config import Config
from pods_cluster.run.curriculum import Curriculum, pass_rate
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.selection.rules import group_rng
from pods_cluster.types import GroupId

MOST_SKIPPED = 4
"""Epochs in a row in which a prompt may be skipped."""
STEP = 0.01
"""Step by which an adapting chance moves after each training step; it stays between this and 1."""
EASY_PART = Fraction(1, 3)
"""Part of the wanted share of groups without signal that easy prompts may have (the paper's 1 : 2)."""
_ATTEMPT = 2**62
"""In place of an attempt: a random stream that no group has."""


class PromptHistory:
    """Counts of groups without signal in a row, by row of the dataset, beside the `curriculum` of a run, if it has one.

    `revisit` None: nothing is skipped for want of a signal. `target` None: the chance stays as it is. `rate` gives the pass
    rate of a group (NaN: unknown); above one half the prompt is easy, else hard.
    """

    def __init__(
        self,
        revisit: float | None,
        seed: int,
        curriculum: Curriculum | None = None,
        *,
        target: float | None = None,
        rate: Callable[[GroupStats], float] = lambda _: math.nan,
    ) -> None:
        self.revisit, self._seed, self.curriculum = revisit, seed, curriculum
        # as it is written, not as the float nearest to it: shares of groups are compared with it exactly
        self._target = None if target is None else Fraction(str(target))
        self._rate = rate
        self._chances = dict.fromkeys((True, False), 1.0 if revisit is None else revisit)
        # row -> (groups without signal in a row, epoch of the last one, whether it was easy)
        self._silent: dict[int, tuple[int, int, bool]] = {}
        self._groups = 0
        self._without: Counter[bool] = Counter()

    @classmethod
    def of(cls, config: Config) -> PromptHistory:
        """The history that a run's configuration asks for."""
        return cls(
            config.data.revisit, config.run.seed, Curriculum.of(config), target=config.data.revisit_target,
            rate=pass_rate(config),
        )  # fmt: skip

    def saw(self, epoch: int, row: int, signal: bool, stats: GroupStats | None = None) -> None:
        """A group of this row was complete, and had a signal or none."""
        if self.revisit is None:
            return
        self._groups += 1
        if signal:
            self._silent.pop(row, None)
            return
        easy = stats is not None and self._rate(stats) > 0.5
        self._without[easy] += 1
        times, last, _ = self._silent.get(row, (0, -1, easy))
        if last < epoch:  # a step that was broken off is made again when the run goes on: its groups count once
            self._silent[row] = times + 1, epoch, easy

    def adapt(self) -> None:
        """The groups of a step were all seen: with a `target` the chances move one STEP."""
        if self._target is not None and self._groups:
            for easy, part in ((True, EASY_PART), (False, 1 - EASY_PART)):
                enough = self._without[easy] >= part * self._target * self._groups
                moved = self._chances[easy] + (-STEP if enough else STEP)
                self._chances[easy] = min(1.0, max(STEP, round(moved, 6)))
        self._groups = 0
        self._without.clear()

    @property
    def chances(self) -> list[float]:
        """The adapting chances of easy and of hard prompts, for a checkpoint; empty where none adapts."""
        return [self._chances[True], self._chances[False]] if self._target is not None else []

    def skips(self, epoch: int, row: int) -> bool:
        """Whether the row is left out in this epoch."""
        if self.curriculum is not None and self.curriculum.skips(epoch, row):
            return True
        if self.revisit is None or row not in self._silent:
            return False
        times, last, easy = self._silent[row]
        if not last < epoch <= last + MOST_SKIPPED:
            return False
        return float(group_rng(self._seed, GroupId(epoch, row, _ATTEMPT)).random()) >= self._chances[easy] ** times

    def state(self) -> list[list[int]]:
        """[row, groups without signal in a row, epoch of the last, 1 for an easy one] of each such row, for a checkpoint."""
        return [[row, times, epoch, int(easy)] for row, (times, epoch, easy) in sorted(self._silent.items())]

    def restore(self, state: Iterable[Sequence[int]], chances: Sequence[float] = ()) -> None:
        """Go on with what `state` and `chances` returned; rows of older versions do not say whether they were easy."""
        self._silent = {row: (times, epoch, any(easy)) for row, times, epoch, *easy in state}
        if chances and self._target is not None:
            self._chances = dict(zip((True, False), chances, strict=True))
