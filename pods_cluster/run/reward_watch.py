"""When people are told of rewards that fail: at the first failure, and then each time it has happened ten times as
often (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scoring_totals import RewardFailures
from pods_cluster.telemetry.recorder import Recorder

GROWTH = 10
"""A failure is told again when it has happened so many times as often as when it was told last."""


class RewardWatch:
    """Tells people of rewards that fail, by warnings of the run; keeps what a final error says of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told: dict[tuple[str, FailureKind], int] = {}
        self._failures: list[RewardFailures] = []

    def look(self, failures: Sequence[RewardFailures]) -> None:
        """Tell of those that are news: each reward and kind at 1, 10, 100, … failures."""
        self._failures = list(failures)
        for failure in failures:
            key = (failure.reward, failure.kind)
            told = self._told.get(key, 0)
            if failure.count > told and failure.count >= told * GROWTH:
                self._told[key] = failure.count
                self._recorder.event(
                    "reward_failed",
                    f"{failure}; these rollouts are left out",
                    level="warning",
                    reward=failure.reward,
                    failure=failure.kind.value,
                    count=failure.count,
                    share=failure.share,
                    message=failure.message,
                )

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
