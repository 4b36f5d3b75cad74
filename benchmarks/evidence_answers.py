"""What the runs of one question say: curves, time to the target by every clock, and the means that explain them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._result_file import table
from benchmarks.evidence_clocks import Clock
from pods_cluster.telemetry.arm_comparison import ACCURACY, compare, mean_band
from pods_cluster.telemetry.curves import Axis, CurveError, RunSeries
from pods_cluster.telemetry.speedup import Target

RESULT = Path(__file__).parent / "results" / "evidence_cpu.json"
AXES: tuple[Axis, ...] = ("training-minutes", "steps")
POINTS = 11
"""Points of a curve that are kept: enough for a figure."""
CURVE_DIGITS, DIGITS = 3, 4
"""Significant digits of a curve's points, and of what the page's tables tell."""
RESULT_COLUMNS = ("arm", "seeds", "final", "final_low", "final_high", "best")
CLOCK_COLUMNS = ("arm", "baseline_reaches_at", "reaches_at", "speed_up", "speed_up_low", "speed_up_high")
ROW_COLUMNS = (*CLOCK_COLUMNS[:1], "axis", *CLOCK_COLUMNS[1:], "difference", "difference_low", "difference_high")  # fmt: skip
BESIDE_COLUMNS = ("arm", "other", *ROW_COLUMNS[-3:])
EXPLAINS = ("grad_norm", "reward_std", "reward_std/kept", "frac_reward_zero_std", "completions/mean_length",
            "completions/kept_mean_length", "timing_s/generate", "timing_s/update", "timing_s/publish",
            "timing_s/step")  # fmt: skip
"""Means over a run that say why an arm is as it is."""


def answer(
    arms: Mapping[str, list[RunSeries]],
    baseline: str,
    target: Target,
    which: Sequence[Clock] = (),
    *,
    by_steps: bool = False,
    beside: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Curves, speed-ups on every axis and by every clock, and what explains them. `by_steps`: curves over steps too;
    `beside`: (arm, other) whose difference at equal steps is told too, where both were run.
    """
    baseline = baseline if baseline in arms else next(iter(arms))
    own = compare(arms, baseline=baseline, target=target, axes=AXES)
    told = {}
    for clock in which:
        retold = {label: [clock.retell(run) for run in runs] for label, runs in arms.items()}
        rows = compare(retold, baseline=baseline, target=target, axes=("training-minutes",)).rows()
        told[clock.name] = _table((row for row in rows if row["arm"] != baseline), CLOCK_COLUMNS)
    axes = AXES if by_steps else AXES[:1]
    curves = [
        {"axis": axis, **_thinned(mean_band(label, runs, ACCURACY, axis))}
        for axis in axes
        for label, runs in arms.items()
    ]
    rows = list(own.rows())
    lengths = {run.config.get("run", {}).get("max_seconds") for runs in arms.values() for run in runs}
    return {
        "baseline": baseline,
        "seconds": lengths.pop() if len(lengths) == 1 else None,
        "target": next((_short(row["target"], DIGITS) for row in rows if row["target"] is not None), None),
        "results": _table([row for row in rows if row["axis"] == AXES[0]], RESULT_COLUMNS),
        "rows": _table((row for row in rows if row["arm"] != baseline), ROW_COLUMNS),
        "clocks": told,
        "beside": _table((_beside(arms, *pair) for pair in beside if {*pair} <= {*arms}), BESIDE_COLUMNS),
        "curves": curves,
        "explains": _table(({"arm": label} | _means(runs) for label, runs in arms.items()), ("arm", *EXPLAINS)),
        "seeds": {label: [run.seed for run in runs] for label, runs in arms.items()},
    }


def _beside(arms: Mapping[str, list[RunSeries]], arm: str, other: str) -> dict[str, Any]:
    found = compare({other: arms[other], arm: arms[arm]}, baseline=other, axes=("steps",))
    return {"other": other} | next(row for row in found.rows() if row["arm"] == arm)


def _thinned(band: dict[str, Any]) -> dict[str, Any]:
    """At most POINTS points, and no interval where there is none."""
    if band["runs"] == 1:  # its own rows' interval: figures show that between seeds
        band = {name: value for name, value in band.items() if name not in ("low", "high")}
    count = len(band["x"])
    kept = (
        sorted({round(place * (count - 1) / (POINTS - 1)) for place in range(POINTS)})
        if count > POINTS
        else range(count)
    )
    return {
        name: [_short(value[at]) for at in kept] if isinstance(value, list) else value for name, value in band.items()
    }


def _short(value: float, digits: int = CURVE_DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def _table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[Any]]:
    """These columns, with no more digits than the page shows."""
    found = table(rows, columns)
    found["rows"] = [
        [_short(value, DIGITS) if isinstance(value, float) and math.isfinite(value) else value for value in row]
        for row in found["rows"]
    ]
    return found


def _means(runs: Sequence[RunSeries]) -> dict[str, float]:
    """Means over steps and seeds. The reward's spread over kept and group tells how much of the variance was kept."""
    found: dict[str, float] = {}
    for name in EXPLAINS:
        try:
            values = [float(run.points(name, "steps")[1].mean()) for run in runs]
        except CurveError:
            continue
        found[name] = sum(values) / len(values)
    return found
