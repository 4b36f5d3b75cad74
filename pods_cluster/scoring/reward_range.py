"""The tolerance of the range that a reward declares: how far a number may miss it by rounding."""

from __future__ import annotations

TOLERANCE = 1e-6
"""Share of a range's width, or of its larger end: what a float32 loses, and less than any two rewards differ by."""


def range_slack(low: float, high: float) -> float:
    """Return how far beyond an end of the range a reward may be and still count as at it."""
    return TOLERANCE * max(high - low, abs(low), abs(high))


def into_range(value: float, low: float, high: float) -> float | None:
    """Return the value, moved onto an end that it misses by rounding alone; None where it is outside the range."""
    slack = range_slack(low, high)
    return min(high, max(low, value)) if low - slack <= value <= high + slack else None
