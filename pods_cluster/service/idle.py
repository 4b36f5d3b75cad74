"""Idle share of each pool: 1 - its tokens/s over its saturated rate (pure).

A pool that decodes one straggler is busy by the clock and idle by its work, so time alone will not do. The saturated
rate is calibrated in the run itself: the best rate that the pool has kept up over a whole stage.
"""

from __future__ import annotations

import math


class IdleShare:
    """Saturated rates (tokens/s) seen so far, and the idle shares that follow for a step."""

    def __init__(self) -> None:
        self.generator_rate = 0.0
        self.learner_rate = 0.0

    def values(
        self,
        *,
        step_seconds: float,
        sampled_tokens: float,
        generate_seconds: float,
        trained_tokens: float,
        update_seconds: float,
    ) -> dict[str, float]:
        """Shares of one step, from its tokens and the seconds that its stages took."""
        self.generator_rate = max(self.generator_rate, _rate(sampled_tokens, generate_seconds))
        self.learner_rate = max(self.learner_rate, _rate(trained_tokens, update_seconds))
        values = {
            "generator/tokens_per_second": _rate(sampled_tokens, step_seconds),
            "generator/saturated_tokens_per_second": self.generator_rate,
            "learner/tokens_per_second": _rate(trained_tokens, update_seconds),
            "learner/saturated_tokens_per_second": self.learner_rate,
        }
        if self.generator_rate:
            values["generator/idle_share"] = _idle(_rate(sampled_tokens, step_seconds), self.generator_rate)
        if self.learner_rate:
            values["learner/idle_share"] = _idle(_rate(trained_tokens, step_seconds), self.learner_rate)
        return values


def _rate(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 and math.isfinite(seconds) else 0.0


def _idle(rate: float, saturated: float) -> float:
    return min(1.0, max(0.0, 1.0 - rate / saturated))
