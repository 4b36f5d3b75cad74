"""Arms of an experiment against a baseline: accuracy, time to a target on every axis, and the speed-up (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pods_cluster.telemetry.curves import Axis, CurveError, RunSeries, curve, student_t
from pods_cluster.telemetry.speedup import RESAMPLES, Difference, Ratio, Seeded, Target, difference, speed_up

ACCURACY = "eval/greedy_accuracy"
AXES: tuple[Axis, ...] = ("training-minutes", "minutes", "gpu-seconds", "steps", "rollouts", "tokens")
REWARD_STEPS = 10
"""Steps over which the training reward is averaged."""


@dataclass(frozen=True, slots=True)
class Against:
    """An arm beside the baseline on one axis."""

    ratio: Ratio
    difference: Difference | None
    """At the last x that all runs reached; None without a seed in common."""


@dataclass(slots=True)
class ArmResult:
    """Result of one arm. `first` and `best` are of the mean curve over seeds, `final` is the mean of the runs' last values, and
    `low` and `high` its interval (over seeds, or of the held-out rows of a single run). `reward` is the mean over the last
    ten steps.
    """

    label: str
    runs: list[str]
    seeds: list[int]
    first: float
    final: float
    low: float
    high: float
    best: float
    steps: int
    minutes: float
    reward: float | None
    axes: dict[Axis, Against] = field(default_factory=dict)


@dataclass(slots=True)
class Comparison:
    """Arms beside a baseline. `left_out` says which axes cannot be had, and why."""

    metric: str
    baseline: str
    target: Target
    arms: list[ArmResult]
    left_out: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The comparison for JSON: None in place of NaN and of infinity."""
        return _plain(asdict(self))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One flat row for each arm and axis."""
        for arm in self.arms:
            for axis, against in arm.axes.items():
                ratio, gap = against.ratio, against.difference
                yield _plain(
                    {
                        "arm": arm.label,
                        "baseline": self.baseline,
                        "metric": self.metric,
                        "axis": axis,
                        "seeds": len(arm.runs),
                        "final": arm.final,
                        "final_low": arm.low,
                        "final_high": arm.high,
                        "best": arm.best,
                        "target": ratio.target,
                        "baseline_reaches_at": ratio.baseline_at,
                        "reaches_at": ratio.arm_at,
                        "speed_up": ratio.value,
                        "speed_up_low": ratio.low,
                        "speed_up_high": ratio.high,
                        "speed_up_at_least": ratio.at_least,
                        "speed_up_at_most": ratio.at_most,
                        "paired_seeds": ratio.seeds if ratio.paired else 0,
                        "difference": gap.value if gap else None,
                        "difference_low": gap.low if gap else None,
                        "difference_high": gap.high if gap else None,
                        "difference_at": gap.at if gap else None,
                    }
                )


def compare(
    arms: Mapping[str, Sequence[RunSeries]],
    *,
    baseline: str | None = None,
    metric: str = ACCURACY,
    target: Target | None = None,
    axes: Sequence[Axis] = AXES,
    hold: bool = False,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare arms (label -> its runs, one a seed) with the one that is called `baseline` (default: the first).

    An axis that some run does not have (GPU-seconds on a CPU) is left out and told. Raises CurveError: an unknown
    baseline, a run without the metric, or two runs of one seed in an arm.
    """
    labels, target = list(arms), target or Target()
    baseline = labels[0] if baseline is None else baseline
    if baseline not in arms:
        raise CurveError(f"baseline: {baseline!r} is none of the arms {', '.join(labels)}")
    results = {label: _result(label, runs, metric) for label, runs in arms.items()}
    found = Comparison(metric, baseline, target, list(results.values()))
    for axis in axes:
        try:
            curves = {label: _by_seed(label, runs, metric, axis) for label, runs in arms.items()}
        except CurveError as error:
            found.left_out[axis] = str(error)
            continue
        for label, result in results.items():
            try:
                ratio = speed_up(curves[baseline], curves[label], target, hold=hold, resamples=resamples)
            except ValueError as error:
                found.left_out[axis] = f"{label}: {error}"
                continue
            try:
                gap = difference(curves[baseline], curves[label], hold=hold)
            except ValueError:
                gap = None
            result.axes[axis] = Against(ratio, gap)
    return found


def _result(label: str, runs: Sequence[RunSeries], metric: str) -> ArmResult:
    joined = curve(label, runs, metric, "steps")
    # each run's own last value: runs that end by the clock make different numbers of steps
    final, low, high = float(joined.y[-1]), float(joined.low[-1]), float(joined.high[-1])
    if len(runs) > 1:
        last = np.array([run.points(metric, "steps")[1][-1] for run in runs])
        final = float(last.mean())
        half = student_t(len(runs) - 1) * float(last.std(ddof=1)) / math.sqrt(len(runs))
        low, high = final - half, final + half
    minutes = [float(run.points(metric, "minutes")[0][-1]) for run in runs]
    return ArmResult(
        label=label,
        runs=[run.name for run in runs],
        seeds=sorted(seed for run in runs if (seed := run.seed) is not None),
        first=float(joined.y[0]),
        final=final,
        low=low,
        high=high,
        best=max(float(joined.y.max()), final),
        steps=int(joined.x[-1]),
        minutes=float(np.mean(minutes)),
        reward=_last_reward(runs),
    )


def _last_reward(runs: Sequence[RunSeries]) -> float | None:
    try:
        rewards = [run.points("reward", "steps")[1][-REWARD_STEPS:].mean() for run in runs]
    except CurveError:
        return None
    return float(np.mean(rewards))


def _by_seed(label: str, runs: Sequence[RunSeries], metric: str, axis: Axis) -> Seeded:
    """The curves of an arm by seed; runs without a known seed are numbered in their order."""
    found: dict[int, Any] = {}
    for place, run in enumerate(runs):
        seed = place if run.seed is None else run.seed
        if seed in found:
            raise CurveError(f"{label}: {run.name} has the seed {seed} of another run of this arm; leave one out")
        x, y = run.points(metric, axis)
        if not x[-1] > x[0] and len(x) > 1:
            raise CurveError(f"{run.name}: has no {axis}")
        found[seed] = x, y
    return found


def averaged(arms: Mapping[str, Sequence[RunSeries]], metric: str) -> dict[str, list[RunSeries]]:
    """The arms as they are compared by this metric: one of training steps (the reward) as means over ten of them."""
    if metric.startswith("eval/"):
        return {label: list(runs) for label, runs in arms.items()}
    return {label: [run.averaged(metric, REWARD_STEPS) for run in runs] for label, runs in arms.items()}


def mean_band(label: str, runs: Sequence[RunSeries], metric: str, axis: Axis) -> dict[str, Any]:
    """The mean curve of an arm with its interval, as plain lists: `label`, `runs`, `x`, `y`, `low`, `high`."""
    found = curve(label, runs, metric, axis)
    columns = {"x": found.x, "y": found.y, "low": found.low, "high": found.high}
    return {"label": label, "runs": found.runs} | {name: values.tolist() for name, values in columns.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
