"""The range that a reward declares, and how far a number may miss it by rounding."""

from __future__ import annotations

TOLERANCE = 1e-6
"""Of the width of a range, or of its larger end: what a float32 loses, and less than any two rewards differ by."""


def range_slack(low: float, high: float) -> float:
    """How far beyond an end a reward may lie and still count as at it."""
    return TOLERANCE * max(high - low, abs(low), abs(high))


def into_range(value: float, low: float, high: float) -> float | None:
    """The value, put onto the end that it misses by rounding alone; None where it lies outside the range."""
    slack = range_slack(low, high)
    return min(high, max(low, value)) if low - slack <= value <= high + slack else None
