"""One sentence on two runs that differ in one thing, true to their numbers (pure)."""

from __future__ import annotations

import math

import numpy as np

from pods_cluster.telemetry.curves import CurveError, RunSeries
from pods_cluster.telemetry.number_format import duration, percent

ACCURACY = "eval/greedy_accuracy"


def verdict(first_label: str, first: RunSeries, second_label: str, second: RunSeries) -> str:
    """Held-out accuracy of both after the same number of steps, and in the time of the shorter one.

    A difference counts as more than chance where its 95 % interval (normal, rows taken as independent) leaves out 0.
    Raises CurveError where a run was not evaluated, or they have no evaluated step in common.
    """
    step = _last_common_step(first, second)
    (a, rows, took_a), (b, _, took_b) = _at(first, step), _at(second, step)
    difference = a - b
    half = 1.96 * math.sqrt((a * (1 - a) + b * (1 - b)) / rows) if rows else 0.0
    chance = "more than chance between the rows" if abs(difference) > half else "within chance between the rows"
    text = (
        f"After {step} updates {first_label} has {percent(a, 1)} of {rows:.0f} held-out rows right and {second_label} "
        f"{percent(b, 1)}: {100 * difference:+.1f} points (± {100 * half:.1f}), {chance}, one seed each."
    )
    return f"{text} {_in_the_same_time(first_label, first, took_a, second_label, second, took_b)}"


def _in_the_same_time(
    first_label: str, first: RunSeries, took_a: float, second_label: str, second: RunSeries, took_b: float
) -> str:
    """A clause on what the slower of two had reached when the quicker one was there."""
    slow_label, slow, quick_label = (
        (first_label, first, second_label) if took_a >= took_b else (second_label, second, first_label)
    )
    limit, other = min(took_a, took_b), max(took_a, took_b)
    minutes, shares = slow.points(ACCURACY, "minutes")
    before = np.flatnonzero(minutes <= limit)
    spent = f"{quick_label} took {duration(60 * limit)}, {slow_label} {duration(60 * other)}"
    if not len(before):
        return f"{spent}."
    return f"{spent}, of which in the first {duration(60 * limit)} it came to {percent(float(shares[before[-1]]), 1)}."


def _last_common_step(first: RunSeries, second: RunSeries) -> int:
    steps = [set(series.points(ACCURACY, "steps")[0].tolist()) for series in (first, second)]
    common = {step for step in steps[0] & steps[1] if step > 0}
    if not common:
        raise CurveError(f"{first.name} and {second.name}: no step after the first at which both were evaluated")
    return int(max(common))


def _at(series: RunSeries, step: int) -> tuple[float, float, float]:
    """(accuracy, rows, minutes) of the evaluation at a step."""
    steps, shares = series.points(ACCURACY, "steps")
    at = int(np.flatnonzero(steps == step)[0])
    record = next(record for record in series.records if record["step"] == step)
    rows = record.get("eval/rows", 0)
    return float(shares[at]), float(rows), float(series.points(ACCURACY, "minutes")[0][at])
