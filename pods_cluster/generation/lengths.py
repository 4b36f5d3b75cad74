"""How long the rollouts of a prompt are expected to be, from those that came before (pure)."""

from __future__ import annotations

import math

REMEMBERED = 1_000_000
"""Rows whose lengths are remembered; the oldest are forgotten first."""
MEMORY = 0.98
"""What a group leaves of the mean over all rows."""


class ExpectedLengths:
    """Completion tokens a rollout: the row's own mean from an earlier attempt or epoch, else the mean of late."""

    def __init__(self) -> None:
        self._rows: dict[int, float] = {}
        self._mean: float | None = None

    def seen(self, row: int, mean: float) -> None:
        """A group of this row had rollouts of this mean length; NaN (none finished) is passed over."""
        if not math.isfinite(mean):
            return
        self._rows.pop(row, None)
        self._rows[row] = mean
        if len(self._rows) > REMEMBERED:
            del self._rows[next(iter(self._rows))]
        self._mean = mean if self._mean is None else MEMORY * self._mean + (1 - MEMORY) * mean

    def expected(self, row: int) -> float | None:
        """None while nothing is known at all."""
        return self._rows.get(row, self._mean)
