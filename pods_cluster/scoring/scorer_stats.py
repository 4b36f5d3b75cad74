"""Counts of scored requests and of failures, by reward and kind."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from pods_cluster.scoring.score import FailureKind


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counts since the pool was created.

    scored: requests answered; missing: those of them without a total. failures: reward -> kind -> count, and
    samples: reward -> kind -> its first messages. skipped: reward -> rows to which it did not apply.
    restarts: processes started again after one was lost. printed: lines that rewards printed. pending: requests that
    are not answered yet.
    """

    scored: int
    missing: int
    restarts: int
    failures: dict[str, dict[FailureKind, int]]
    skipped: dict[str, int]
    samples: dict[str, dict[FailureKind, list[str]]]
    printed: int = 0
    pending: int = 0


class StatsCounter:
    """Collects `ScorerStats` from the threads of a pool; any thread may call it."""

    def __init__(self, rewards: list[str], samples: int) -> None:
        self._lock = threading.Lock()
        self._keep = samples
        self._scored = self._missing = self._restarts = 0
        self._failures: dict[str, Counter[FailureKind]] = {reward: Counter() for reward in rewards}
        self._skipped: Counter[str] = Counter(dict.fromkeys(rewards, 0))
        self._samples: dict[str, dict[FailureKind, list[str]]] = {reward: {} for reward in rewards}

    def scored(self, has_total: bool) -> None:
        """Count a request that was answered."""
        with self._lock:
            self._scored += 1
            self._missing += not has_total

    def restarted(self) -> None:
        """Count a process that was started again."""
        with self._lock:
            self._restarts += 1

    def skipped(self, reward: str) -> None:
        """Count a row to which a reward did not apply."""
        with self._lock:
            self._skipped[reward] += 1

    def failed(self, reward: str, kind: FailureKind, message: str) -> None:
        """Count a failure, and keep its message if there are few of its kind."""
        with self._lock:
            self._failures[reward][kind] += 1
            kept = self._samples[reward].setdefault(kind, [])
            if len(kept) < self._keep:
                kept.append(message)

    def read(self, printed: int = 0, submitted: int = 0) -> ScorerStats:
        """Return a copy of the counts."""
        with self._lock:
            return ScorerStats(
                self._scored,
                self._missing,
                self._restarts,
                {reward: dict(counts) for reward, counts in self._failures.items()},
                dict(self._skipped),
                {
                    reward: {kind: list(texts) for kind, texts in kinds.items()}
                    for reward, kinds in self._samples.items()
                },
                printed,
                max(0, submitted - self._scored),
            )
