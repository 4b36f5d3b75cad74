"""Idle share of each pool: 1 - its tokens/s over its saturated rate (pure).

A pool that decodes one straggler is busy by the clock and idle by its work, so time alone will not do. The saturated
rate is calibrated in the run itself: the best that each engine has kept up for eight seconds of work (for one, until
it has worked so long), that of the learner over a whole update.
"""

from __future__ import annotations

import math


class IdleShare:
    """Saturated rates (tokens/s) seen so far, and the idle shares that follow for a step."""

    def __init__(self) -> None:
        self.generator_rate = 0.0
        self.learner_rate = 0.0
        self._sizes = (0, 0)

    def sizes(self, generators: int, learners: int) -> None:
        """The pools' sizes from now on; a rate that was saturated before is so in proportion."""
        before, self._sizes = self._sizes, (generators, learners)
        if before[1] and before[1] != learners:
            self.learner_rate *= learners / before[1]

    def values(
        self,
        *,
        step_seconds: float,
        generated_tokens: float,
        generating_seconds: float,
        saturated: float,
        trained_tokens: float,
        update_seconds: float,
    ) -> dict[str, float]:
        """Shares of one step, from its tokens and the seconds that its stages took.

        `generated_tokens` came in `generating_seconds` of wall time, whichever group they belong to; `saturated` is the
        sum of the rates that the workers have kept up (0 while none has worked for a second).
        """
        generated = _rate(generated_tokens, generating_seconds)
        self.generator_rate = max(saturated, generated)
        self.learner_rate = max(self.learner_rate, _rate(trained_tokens, update_seconds))
        values = {
            "generator/tokens_per_second": generated,
            "generator/saturated_tokens_per_second": self.generator_rate,
            "learner/tokens_per_second": _rate(trained_tokens, update_seconds),
            "learner/saturated_tokens_per_second": self.learner_rate,
        }
        if saturated:
            values["generator/idle_share"] = _idle(generated, self.generator_rate)
        if self.learner_rate:
            values["learner/idle_share"] = _idle(_rate(trained_tokens, step_seconds), self.learner_rate)
        return values


def _rate(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 and math.isfinite(seconds) else 0.0


def _idle(rate: float, saturated: float) -> float:
    return min(1.0, max(0.0, 1.0 - rate / saturated))
