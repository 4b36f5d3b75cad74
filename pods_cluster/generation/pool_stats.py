"""Numbers of the whole generator pool, by their names in the catalogue of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pods_cluster.generation.messages import WorkerStats
from pods_cluster.generation.thread_seconds import ThreadSeconds
from pods_cluster.telemetry.process_memory import largest_memory


@dataclass(slots=True)
class PoolStats:
    """Every worker that answered, and counts since the last time they were read: `generated_tokens` in `seconds`, of
    which the engines, taken together, computed for `busy_seconds`, and they or the scorers had something for
    `occupied_seconds`, the scorers alone for `only_scoring_seconds`. `thread`: the engines' threads, taken together."""

    workers: dict[str, WorkerStats]
    since: Mapping[str, int] = field(default_factory=dict)
    generated_tokens: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    occupied_seconds: float = 0.0
    only_scoring_seconds: float = 0.0
    thread: ThreadSeconds = field(default_factory=ThreadSeconds)
    staging_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens a second over the last second or two."""
        return sum(stats.tokens_per_second for stats in self.workers.values())

    @property
    def saturated(self) -> float:
        """Sum of the best rates that the workers kept up."""
        return sum(stats.saturated for stats in self.workers.values())

    @property
    def in_flight(self) -> int:
        """Rollouts in the engines, at the scorers, or finished and stored."""
        return sum(
            stats.engine.running + stats.engine.waiting + stats.scoring + stats.stored
            for stats in self.workers.values()
        )

    @property
    def occupied_seconds_mean(self) -> float:
        """`occupied_seconds`, mean over the workers."""
        return self.occupied_seconds / max(1, len(self.workers))

    def metrics(self) -> dict[str, float]:
        """Gauges of now; counts since the last reading."""
        workers = list(self.workers.values())
        count = max(1, len(workers))
        values = {
            "generator/workers": float(len(workers)),
            "generator/running": float(sum(stats.engine.running for stats in workers)),
            "generator/waiting": float(sum(stats.engine.waiting for stats in workers)),
            "generator/busy_seconds": self.busy_seconds / count,
            "generator/occupied_seconds": self.occupied_seconds_mean,
            "generator/weights_seconds": self.thread.weights / count,
            "generator/verifying_seconds": self.thread.verifying / count,
            "generator/empty_seconds": self.thread.empty / count,
            "generator/between_seconds": self.thread.between / count,
            "generator/steps": self.thread.count / count,
            "weights/staging_seconds": self.staging_seconds / count,
            "generator/kv_cache_usage": sum(stats.engine.kv_cache_usage for stats in workers) / count,
            "scoring/seconds_mean": sum(stats.scoring_seconds_mean for stats in workers) / count,
            "scoring/seconds_max": max((stats.scoring_seconds_max for stats in workers), default=0.0),
            "timing_s/score": self.only_scoring_seconds / count,
        }
        if self.thread.steps:
            values["generator/mean_running"] = len(workers) * self.thread.rollout_seconds / self.thread.steps
        values |= largest_memory(stats.memory for stats in workers).metrics("generator")
        since = {name: float(value) for name, value in self.since.items()}
        played, turns, limited = (since.pop(f"turns/{name}", 0.0) for name in ("rollouts", "total", "limited"))
        if played:
            values |= {"turns/mean": turns / played, "turns/limited": limited / played}
        return values | since


def counters(workers: Mapping[str, WorkerStats]) -> dict[str, Counter[str]]:
    """Each worker's counts since its start, by metric name."""
    result: dict[str, Counter[str]] = {}
    for name, stats in workers.items():
        counts: Counter[str] = Counter(
            {
                "generator/preemptions": stats.engine.preemptions,
                "tokens/prompt": stats.engine.prompt_tokens,
                "tokens/recomputed": stats.engine.recomputed_tokens,
                "weights/staged": stats.staged,
            }
        )
        counts.update(stats.turns)
        if stats.scorers is not None:
            counts["scoring/restarts"] = stats.scorers.restarts
            for reward, kinds in stats.scorers.failures.items():
                for kind, number in kinds.items():
                    counts[f"scoring/failures/{kind.value}/{reward}"] = number
        result[name] = counts
    return result
