"""Which prompts taught nothing of late, and are skipped before any rollout is made (GRESO, arXiv 2506.02177; pure).

A prompt whose last z groups in a row had no signal is likely to have none again. It is skipped with the chance 1 - p^z, p
being `data.revisit` (the paper's p_e, which adapts there and is fixed here), and never in more than MOST_SKIPPED epochs in a
row: none is lost for ever. The decision is a function of (run's seed, epoch, row, z), so that a resumed run makes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pods_cluster.run.curriculum import Curriculum
from pods_cluster.selection.rules import group_rng
from pods_cluster.types import GroupId

MOST_SKIPPED = 4
"""Epochs in a row in which a prompt may be skipped."""
_ATTEMPT = 2**62
"""In place of an attempt: a random stream that no group has."""


class PromptHistory:
    """Counts of groups without signal in a row, by row of the dataset, beside the `curriculum` of a run, if it has one.

    `revisit` None: nothing is skipped for want of a signal.
    """

    def __init__(self, revisit: float | None, seed: int, curriculum: Curriculum | None = None) -> None:
        self.revisit, self._seed, self.curriculum = revisit, seed, curriculum
        self._silent: dict[int, tuple[int, int]] = {}  # row -> (groups without signal in a row, epoch of the last one)

    def saw(self, epoch: int, row: int, signal: bool) -> None:
        """A group of this row was complete, and had a signal or none."""
        if self.revisit is None:
            return
        if signal:
            self._silent.pop(row, None)
            return
        times, last = self._silent.get(row, (0, -1))
        if last < epoch:  # a step that was broken off is made again when the run goes on: its groups count once
            self._silent[row] = times + 1, epoch

    def skips(self, epoch: int, row: int) -> bool:
        """Whether the row is left out in this epoch."""
        if self.curriculum is not None and self.curriculum.skips(epoch, row):
            return True
        if self.revisit is None or row not in self._silent:
            return False
        times, last = self._silent[row]
        if not last < epoch <= last + MOST_SKIPPED:
            return False
        return float(group_rng(self._seed, GroupId(epoch, row, _ATTEMPT)).random()) >= self.revisit**times

    def state(self) -> list[list[int]]:
        """[row, groups without signal in a row, epoch of the last] of each such row, for a checkpoint."""
        return [[row, times, epoch] for row, (times, epoch) in sorted(self._silent.items())]

    def restore(self, state: Iterable[Sequence[int]]) -> None:
        """Go on with what `state` returned."""
        self._silent = {row: (times, epoch) for row, times, epoch in state}
