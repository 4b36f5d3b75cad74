"""`rollouts_per_prompt: auto`: idle generator time becomes more rollouts a prompt, learner waiting fewer (pure)."""

from __future__ import annotations

TOLERATED = 0.05
"""Share of a step that the learner may wait before n shrinks."""
GROWTH = 1.125
MOST = 0.5
"""Of the waited share at most so much counts at once: one slow step is no trend."""
IDLE = 0.05
"""Share of a step that the generators may have nothing to do before n grows."""


def next_rollouts(n: int, low: int, high: int, *, waited: float, idle: bool) -> int:
    """The n of the groups issued next, in low … high.

    `waited` is the share of the step in which the learner waited for groups: generating takes 1 / (1 - waited) times as
    long as the rest, so n goes half-way to where both take as long. With `idle` (the learner hardly waited, and the generators
    had nothing to do for a part of the step) it grows by an eighth.
    """
    if waited > TOLERATED:
        wanted = n * (1.0 - min(waited, MOST) / 2)
        return min(high, max(low, min(n - 1, round(wanted))))
    if idle:
        return max(low, min(high, max(n + 1, round(n * GROWTH))))
    return min(high, max(low, n))
