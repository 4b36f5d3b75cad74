"""Learning rate of each step: linear warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of step `step` (0 is the first).

    It rises linearly over `warmup_steps` steps, from peak / warmup_steps at step 0 to `peak` at the last of them, so
    that no step is spent at rate 0. Then it stays (`constant`) or falls, linearly or along a half cosine, and would
    reach 0 at step `total_steps`, one after the last. Later steps keep the rate of the last one. Raises ValueError for
    a negative step.
    """
    if step < 0:
        raise ValueError(f"step: {step} is negative; the first step is 0")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    falling = max(total_steps - warmup_steps, 1)
    progress = min(step - warmup_steps, falling - 1) / falling
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
