"""Measurements of one step as the sizing of the pools reads them: seconds of its stages, its tokens, its pools (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRIC_NAMES = {
    "seconds": "timing_s/step",
    "generate_seconds": "timing_s/generate",
    "fetch_seconds": "timing_s/fetch",
    "update_seconds": "timing_s/update",
    "publish_seconds": "timing_s/publish",
    "generated_rollouts": "rollouts/generated",
    "trained_rollouts": "rollouts/trained",
    "sampled_tokens": "tokens/sampled",
    "aborted_tokens": "tokens/aborted",
    "trained_tokens": "tokens/trained",
    "generators": "generator/workers",
    "ranks": "learner/workers",
    "generator_rate": "generator/tokens_per_second",
    "best_generator_rate": "generator/saturated_tokens_per_second",
    "occupied_seconds": "generator/occupied_seconds",
    "groups_in_flight": "groups/in_flight",
    "learner_peak_bytes": "memory/learner/gpu_peak",
}
"""Recorded metric of each field of a `StepMeasurement`. Only `from_record` reads it: a live run measures directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """The times of one step and what it made.

    `seconds` is the wall time of the step without evaluation and checkpoint; `generate_seconds` runs from its first
    request to its last finished rollout. `occupied_seconds` is how long the engines or scorers had something to do, mean
    over the workers (None: not measured). Tokens are completion tokens; `sampled_tokens` include `aborted_tokens`.
    `generator_rate` is the pool's tokens a second since the last step, `best_generator_rate` the sum of the best rates
    that its workers have kept up (0 while none has worked for a second). `groups_in_flight` hold a slot of the ledger
    when the step is over (None: not measured). `learner_peak_bytes` is the most memory of its card that a rank has had.
    """

    seconds: float = 0.0
    generate_seconds: float = 0.0
    fetch_seconds: float = 0.0
    update_seconds: float = 0.0
    publish_seconds: float = 0.0
    generated_rollouts: float = 0.0
    trained_rollouts: float = 0.0
    sampled_tokens: float = 0.0
    aborted_tokens: float = 0.0
    trained_tokens: float = 0.0
    generators: int = 1
    ranks: int = 1
    generator_rate: float = 0.0
    best_generator_rate: float = 0.0
    occupied_seconds: float | None = None
    groups_in_flight: int | None = None
    learner_peak_bytes: float = 0.0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMeasurement:
        """Read a line of a run's `metrics.jsonl`; a field whose metric it does not hold keeps its default."""
        known = {field: record[name] for field, name in METRIC_NAMES.items() if record.get(name) is not None}
        for field in ("generators", "ranks"):
            if field in known:
                known[field] = max(1, round(known[field]))
        return cls(**known)

    @property
    def saturated_rate(self) -> float:
        """Completion tokens a second of the pool when none of its workers waits; 0 while that is not known."""
        return max(self.best_generator_rate, self.generator_rate)
