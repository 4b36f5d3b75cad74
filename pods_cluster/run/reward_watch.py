"""When people are told of rewards that fail: at the first failure, and then each time it has happened ten times as
often (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scoring_totals import RewardFailures

GROWTH = 10
"""A failure is told again when it has happened so many times as often as when it was told last."""


class RewardWatch:
    """What of the failures so far is news, and what of them belongs into a final error."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, FailureKind], int] = {}
        self._failures: list[RewardFailures] = []

    def news(self, failures: Sequence[RewardFailures]) -> list[RewardFailures]:
        """Those that are to be told now; each reward and kind at 1, 10, 100, … failures."""
        self._failures = list(failures)
        due = []
        for failure in failures:
            key = (failure.reward, failure.kind)
            if failure.count >= self._told.get(key, 0) * GROWTH and failure.count > self._told.get(key, 0):
                self._told[key] = failure.count
                due.append(failure)
        return due

    @property
    def worst(self) -> RewardFailures | None:
        """The most frequent failure so far."""
        return max(self._failures, key=lambda failure: failure.count, default=None)

    def describe(self) -> str:
        """The failures so far in one sentence for a final error; empty where there are none."""
        if (worst := self.worst) is None:
            return ""
        more = f" (and {len(self._failures) - 1} more kind(s) of failure)" if len(self._failures) > 1 else ""
        return f"{worst}{more}"
