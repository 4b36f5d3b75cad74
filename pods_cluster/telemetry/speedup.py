"""Time to an accuracy, and how much sooner one arm reaches it than another, with an interval over seeds (pure).

The statistic is that of the PODS paper (arXiv 2504.13818): the first point at which the mean curve over seeds reaches a
target, by default 99 % of the baseline's best. The interval is a percentile bootstrap over seeds (Efron 1979): seeds are drawn
with replacement, the mean curves of both arms, the target and both crossings are computed anew. Arms with the same
seeds are drawn in pairs. An arm that does not reach the target within its run is not left out: its ratio counts as 0, a
baseline's that does not reach it as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from pods_cluster.telemetry.curves import student_t

Points = tuple[Float64[np.ndarray, " k"], Float64[np.ndarray, " k"]]
"""(x, y) of one seed, x rising."""
Seeded = Mapping[int, Points]
"""The curves of one arm, by seed."""

RESAMPLES = 4000
LEVEL = 0.95
SHARE = 0.99
"""Default target: this share of the baseline's best, as in the paper."""
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Target:
    """A value to reach: `value`, else `gain` above the first point of the baseline's mean curve, else the `share` of its
    highest point."""

    value: float | None = None
    share: float = SHARE
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much sooner an arm reaches the target: `baseline_at` / `arm_at`, both on the x axis; None: not reached.

    `low` and `high` are the ends of the 95 % interval, None with fewer than two seeds or where neither reached it; `low` 0
    says that the arm may never reach it, `high` infinite that the baseline may never. `by_seed` are the ratios of single
    seeds (of paired arms), NaN where one of the two did not reach the target. `missed` is the share of resamples in which
    (baseline, arm) did not. Where one alone reached it, the other's end bounds the ratio: `at_least` where the baseline did
    not, `at_most` where the arm did not.
    """

    target: float
    baseline_at: float | None
    arm_at: float | None
    value: float | None
    low: float | None
    high: float | None
    seeds: int
    paired: bool
    by_seed: dict[int, float] = field(default_factory=dict)
    missed: tuple[float, float] = (0.0, 0.0)
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Arm minus baseline at the last x that all runs reached, and its 95 % t-interval over paired seeds (None: one seed)."""

    at: float
    value: float
    low: float | None
    high: float | None
    seeds: int


def on_common_grid(curves: Sequence[Points], *, hold: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(grid [k], values [curves, k]): all points of all curves within the range that they share.

    Between its points a curve is a straight line, or with `hold` its last value. Raises ValueError for curves that share no
    range.
    """
    start, stop = max(float(x[0]) for x, _ in curves), min(float(x[-1]) for x, _ in curves)
    if start > stop:
        raise ValueError(f"the curves share no range: one begins at {start:g}, another ends at {stop:g}")
    grid = np.unique(np.concatenate([x for x, _ in curves] + [np.array([start, stop])]))
    grid = grid[(grid >= start) & (grid <= stop)]
    if hold:
        values = [y[np.searchsorted(x, grid, side="right") - 1] for x, y in curves]
    else:
        values = [np.interp(grid, x, y) for x, y in curves]
    return grid, np.stack(values)


def first_reaching(
    grid: np.ndarray, means: np.ndarray, targets: np.ndarray | float, *, hold: bool = False
) -> Float64[np.ndarray, " rows"]:
    """x at which each row of `means` [rows, k] first is at least its target; infinite where it never is."""
    targets = np.broadcast_to(np.asarray(targets, dtype=float), len(means))
    there = means >= targets[:, None] - _ROUNDING
    at = there.argmax(axis=1)
    rows = np.arange(len(means))
    found = grid[at].astype(float)
    if not hold:
        before = np.maximum(at - 1, 0)
        low, high = means[rows, before], means[rows, at]
        rise = np.where(high > low, high - low, 1.0)
        part = np.clip((targets - low) / rise, 0.0, 1.0)
        found = np.where(at > 0, grid[before] + part * (grid[at] - grid[before]), found)
    return np.where(there.any(axis=1), found, np.inf)


def speed_up(
    baseline: Seeded,
    arm: Seeded,
    target: Target = Target(),
    *,
    hold: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """How much sooner `arm` reaches the target than `baseline`.

    Seeds that both have are paired and all others left out; arms without a common seed are drawn independently. With
    `hold` only measured points count, as in the paper's tables; else a curve is straight between them. Raises ValueError for
    an arm without curves, or whose curves share no range.
    """
    common = sorted(set(baseline) & set(arm))
    paired = bool(common)
    names = (common, common) if paired else (sorted(baseline), sorted(arm))
    if not names[0] or not names[1]:
        raise ValueError("speed_up needs at least one curve of each arm")
    (grid_b, values_b), (grid_a, values_a) = (
        on_common_grid([curves[name] for name in wanted], hold=hold)
        for curves, wanted in zip((baseline, arm), names, strict=True)
    )

    def crossings(weights_b: np.ndarray, weights_a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        means_b, means_a = weights_b @ values_b, weights_a @ values_a
        wanted = _targets(means_b, target)
        return (
            wanted,
            first_reaching(grid_b, means_b, wanted, hold=hold),
            first_reaching(grid_a, means_a, wanted, hold=hold),
        )

    counts = tuple(len(wanted) for wanted in names)
    whole = [np.full((1, count), 1.0 / count) for count in counts]
    (goal,), (at_b,), (at_a,) = crossings(*whole)
    low = high = None
    missed = (float(math.isinf(at_b)), float(math.isinf(at_a)))
    if min(counts) > 1:
        rng = np.random.default_rng(seed)
        drawn_b = rng.multinomial(counts[0], np.full(counts[0], 1 / counts[0]), size=resamples) / counts[0]
        drawn_a = (
            drawn_b
            if paired
            else rng.multinomial(counts[1], np.full(counts[1], 1 / counts[1]), size=resamples) / counts[1]
        )
        _, times_b, times_a = crossings(drawn_b, drawn_a)
        missed = (float(np.isinf(times_b).mean()), float(np.isinf(times_a).mean()))
        ratios = np.sort(_ratios(times_b, times_a))
        ratios = ratios[~np.isnan(ratios)]
        # Where neither mean curve came there, the few draws in which one did say nothing of the ratio.
        if len(ratios) and (math.isfinite(at_b) or math.isfinite(at_a)):
            tail = (1 - LEVEL) / 2
            last = len(ratios) - 1
            low, high = float(ratios[math.floor(tail * last)]), float(ratios[math.ceil((1 - tail) * last)])
    by_seed = {}
    if paired:
        for place, name in enumerate(common):
            one = np.eye(len(common))[place : place + 1]
            # the target is that of all seeds: what is asked of one seed must not depend on its own luck
            seed_b = first_reaching(grid_b, one @ values_b, goal, hold=hold)
            seed_a = first_reaching(grid_a, one @ values_a, goal, hold=hold)
            by_seed[name] = _finite_or_nan(float(_ratios(seed_b, seed_a)[0]))
    value = float(_ratios(np.array([at_b]), np.array([at_a]))[0])
    return Ratio(
        target=float(goal),
        baseline_at=_or_none(at_b),
        arm_at=_or_none(at_a),
        value=value if 0 < value < math.inf else None,
        low=low,
        high=high,
        seeds=min(counts),
        paired=paired,
        by_seed=by_seed,
        missed=missed,
        at_least=float(grid_b[-1] / at_a) if math.isinf(at_b) and 0 < at_a < math.inf else None,
        at_most=float(at_b / grid_a[-1]) if math.isinf(at_a) and math.isfinite(at_b) and grid_a[-1] > 0 else None,
    )


def difference(baseline: Seeded, arm: Seeded, *, hold: bool = False) -> Difference:
    """Arm minus baseline at the last x that all runs of both reached. Raises ValueError without a common seed."""
    common = sorted(set(baseline) & set(arm))
    if not common:
        raise ValueError("difference needs a seed that both arms have")
    both = [curves[name] for curves in (baseline, arm) for name in common]
    grid, values = on_common_grid(both, hold=hold)
    gaps = values[len(common) :, -1] - values[: len(common), -1]
    mean = float(gaps.mean())
    half = student_t(len(gaps) - 1) * float(gaps.std(ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return Difference(
        float(grid[-1]), mean, None if half is None else mean - half, None if half is None else mean + half, len(gaps)
    )


def _targets(means: np.ndarray, target: Target) -> np.ndarray:
    if target.value is not None:
        return np.full(len(means), target.value)
    if target.gain is not None:
        return means[:, 0] + target.gain
    return target.share * means.max(axis=1)


def _ratios(times_b: np.ndarray, times_a: np.ndarray) -> np.ndarray:
    """Baseline over arm; NaN where neither reached the target, or both had it at 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(times_b, dtype=float) / np.asarray(times_a, dtype=float)


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _finite_or_nan(value: float) -> float:
    return value if 0 < value < math.inf else math.nan
