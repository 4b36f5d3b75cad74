"""Idle share of each pool: 1 - its tokens/s over its saturated rate (pure).

A pool that decodes one straggler is busy by the clock and idle by its work, so time alone will not do. The saturated
rate is calibrated in the run itself: the best that each engine has kept up for eight seconds of work (for one, until
it has worked so long), that of the learner over a whole update.
"""

from __future__ import annotations

import math

from pods_cluster.sizing.step_measurement import StepMeasurement


class IdleShare:
    """Saturated rates (tokens/s) seen so far, and the idle shares that follow from them for a step."""

    def __init__(self) -> None:
        self.learner_rate = 0.0
        self._ranks = 0

    def after_step(self, step: StepMeasurement) -> dict[str, float]:
        """The step's metrics: rates of both pools, and the idle share of each whose saturated rate is known.

        The learner's saturated rate follows the number of its ranks in proportion.
        """
        if self._ranks and self._ranks != step.ranks:
            self.learner_rate *= step.ranks / self._ranks
        self._ranks = step.ranks
        learner_rate = tokens_per_second(step.trained_tokens, step.update_seconds)
        self.learner_rate = max(self.learner_rate, learner_rate)
        metrics = {
            "generator/tokens_per_second": step.generator_rate,
            "generator/saturated_tokens_per_second": step.saturated_rate,
            "learner/tokens_per_second": learner_rate,
            "learner/saturated_tokens_per_second": self.learner_rate,
        }
        if step.best_generator_rate:
            metrics["generator/idle_share"] = _idle(step.generator_rate, step.saturated_rate)
        if self.learner_rate:
            over_the_step = tokens_per_second(step.trained_tokens, step.seconds)
            metrics["learner/idle_share"] = _idle(over_the_step, self.learner_rate)
        return metrics


def tokens_per_second(tokens: float, seconds: float) -> float:
    """The rate; 0 where no time has passed."""
    return tokens / seconds if seconds > 0 and math.isfinite(seconds) else 0.0


def _idle(rate: float, saturated: float) -> float:
    return min(1.0, max(0.0, 1.0 - rate / saturated))
