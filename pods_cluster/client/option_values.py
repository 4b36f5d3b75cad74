"""Checks of numbers on the command line that typer's own bounds let pass: NaN is below no smallest value, and ends no wait."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """Return the number. Raises typer.BadParameter for NaN and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number; give one")
    return value


def seconds(value: float) -> float:
    """Return a time to wait. Raises typer.BadParameter for NaN, infinity and less than 0."""
    if value < 0:
        raise typer.BadParameter(f"{value:g} is less than 0; give seconds, or 0 not to wait")
    finite(value)
    return value
