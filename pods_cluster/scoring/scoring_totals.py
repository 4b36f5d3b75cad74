"""Counts of the scorers of a whole pool since its start: scored rollouts, and failures by reward and kind (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_stats import ScorerStats


@dataclass(frozen=True, slots=True)
class RewardFailures:
    """Failures of one reward of one kind since the run's start: `count` of `scored` scorings.

    `message` is the newest known one, with the file and line where the reward failed.
    """

    reward: str
    kind: FailureKind
    count: int
    scored: int
    message: str

    @property
    def share(self) -> float:
        """Failures as a share of all scorings so far; 1 while none has ended."""
        return self.count / self.scored if self.scored else 1.0

    def __str__(self) -> str:
        of = f"{self.count:,} of {self.scored:,} scorings" if self.scored else f"{self.count:,} scorings"
        return f"reward {self.reward!r} gave no number in {of} ({self.kind.value}): {self.message}"


class ScoringTotals:
    """Adds up the counts of the workers' scorers; the counts of workers that are gone stay in the sum."""

    def __init__(self) -> None:
        self._workers: dict[str, ScorerStats] = {}
        self._gone_scored = self._gone_missing = 0
        self.generating = 0
        """Rollouts that the engines had at the last look."""
        self._gone: Counter[tuple[str, FailureKind]] = Counter()
        self._messages: dict[tuple[str, FailureKind], str] = {}

    def update(self, workers: Mapping[str, ScorerStats | None]) -> None:
        """Replace the counts of the workers that answered by their newest ones."""
        for name, stats in workers.items():
            if stats is None:
                continue
            before = self._workers.get(name)
            if before is not None and stats.scored < before.scored:  # another process under the same name
                self._retire(name)
            self._workers[name] = stats
            for reward, kinds in stats.samples.items():
                for kind, texts in kinds.items():
                    if texts:
                        self._messages[reward, kind] = texts[-1]

    def worker_gone(self, name: str) -> None:
        """Keep the counts of a worker that will not answer again."""
        if name in self._workers:
            self._retire(name)

    @property
    def scored(self) -> int:
        """Rollouts that were scored, with a valid reward or without."""
        return self._gone_scored + sum(stats.scored for stats in self._workers.values())

    @property
    def missing(self) -> int:
        """Rollouts of these without a valid reward."""
        return self._gone_missing + sum(stats.missing for stats in self._workers.values())

    @property
    def valid(self) -> int:
        """Rollouts of these with a valid reward."""
        return self.scored - self.missing

    @property
    def pending(self) -> int:
        """Rollouts that wait for their reward."""
        return sum(stats.pending for stats in self._workers.values())

    def failures(self) -> list[RewardFailures]:
        """Return the failures by reward and kind, the most frequent first."""
        counts = Counter(self._gone)
        for stats in self._workers.values():
            for reward, kinds in stats.failures.items():
                for kind, count in kinds.items():
                    counts[reward, kind] += count
        scored = self.scored
        return [
            RewardFailures(reward, kind, count, scored, self._messages.get((reward, kind), "no message"))
            for (reward, kind), count in counts.most_common()
            if count
        ]

    def _retire(self, name: str) -> None:
        stats = self._workers.pop(name)
        self._gone_scored += stats.scored
        self._gone_missing += stats.missing
        for reward, kinds in stats.failures.items():
            for kind, count in kinds.items():
                self._gone[reward, kind] += count
