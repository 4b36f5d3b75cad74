"""Runs side by side: the settings in which they differ, what each came to, and how much sooner one arm is than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pods_cluster.dashboard import comparison_schemas
from pods_cluster.dashboard.columns import Columns
from pods_cluster.dashboard.run_view import RunView
from pods_cluster.telemetry.arm_comparison import compare
from pods_cluster.telemetry.curves import Axis, CurveError, RunSeries, arms, curve
from pods_cluster.telemetry.settings import differing
from pods_cluster.telemetry.speedup import Target

STEPS = 10
"""Steps over which a reward is averaged: one step's is mostly noise."""
RESAMPLES = 1000
"""Bootstrap resamples of an interval over seeds; few, as the page asks again while runs go on."""
POINTS = 300
"""Points of a curve of every step, as of the reward, that are compared."""
ACCURACIES = ("eval/greedy_accuracy", "eval/sampled_accuracy")
Compared = Literal["accuracy", "reward"]
METRICS: Mapping[Compared, tuple[str, ...]] = {"accuracy": ACCURACIES, "reward": ("reward",)}
"""Metrics of a run that are told as accuracy or reward, the first that it has."""
_SIZES = ("generator/workers", "learner/workers")
_SUMMED = ("timing_s/step", "rollouts/generated", "tokens/sampled")


def figures(view: RunView) -> comparison_schemas.Figures:
    """Final and best values of a run, from the steps that are read so far."""
    config = view.config()[1]
    with view.lock:
        columns = view.history.columns
        accuracy = next((values for name in ACCURACIES if (values := _there(columns, name))[1].size), None)
        reward_final, reward_best = _means(_there(columns, "reward")[1])
        latest = columns.latest(["elapsed", "rollout_to_update_ratio/cumulative"])
        best = int(np.argmax(accuracy[1])) if accuracy else 0
        totals = view.history.totals(["rollouts/scored", "rollouts/trained", "tokens/sampled"])
        return comparison_schemas.Figures(
            run=view.id,
            status=view.status()[0],
            step=columns.last_step,
            accuracy_final=_plain(accuracy[1][-1]) if accuracy else None,
            accuracy_best=_plain(accuracy[1][best]) if accuracy else None,
            accuracy_best_step=int(accuracy[0][best]) if accuracy else None,
            reward_final=reward_final,
            reward_best=reward_best,
            seconds=latest.get("elapsed"),
            gpu_seconds=_gpu_seconds(view.id, columns, config),
            rollouts_scored=totals.get("rollouts/scored"),
            rollouts_trained=totals.get("rollouts/trained"),
            ratio=latest.get("rollout_to_update_ratio/cumulative"),
            tokens_sampled=totals.get("tokens/sampled"),
        )


def differences(configs: Sequence[Mapping[str, Any]]) -> list[comparison_schemas.SettingDifference]:
    """The settings in which the configurations differ, by their path, in the order of the first that has them."""
    return [
        comparison_schemas.SettingDifference(name=name, values=values) for name, values in differing(configs).items()
    ]


def arms_of(
    views: Sequence[RunView],
    axis: Axis,
    baseline: str | None = None,
    what: Compared = "accuracy",
    target: float | None = None,
) -> comparison_schemas.Arms | None:
    """The runs as arms, those that differ in their seed alone being one, beside the arm that `baseline` (a run) belongs to;
    None where that cannot be had. Without a `target` to reach it is a share of the baseline's best.
    """
    series = []
    for view in views:
        config = view.config()[1]
        with view.lock:
            metric = next((name for name in METRICS[what] if _there(view.history.columns, name)[1].size), None)
            if metric is not None:
                series.append((metric, RunSeries(view.id, _records(view.history.columns, metric), config)))
    if not series or len({metric for metric, _ in series}) > 1:
        return None
    metric, grouped = series[0][0], arms([run for _, run in series])
    label = next((label for label, runs in grouped.items() if any(run.name == baseline for run in runs)), None)
    try:
        found = compare(grouped, baseline=label, metric=metric, target=Target(target), resamples=RESAMPLES)
        curves = [_curve(label, runs, metric, axis) for label, runs in grouped.items()]
    except CurveError:
        return None
    rows = [row for row in found.rows() if row["arm"] != found.baseline]
    return comparison_schemas.Arms(
        metric=metric,
        axis=axis,
        baseline=found.baseline,
        curves=curves,
        speed_ups=[
            comparison_schemas.SpeedUp(
                arm=row["arm"],
                axis=row["axis"],
                target=row["target"],
                baseline_at=row["baseline_reaches_at"],
                arm_at=row["reaches_at"],
                value=row["speed_up"],
                low=row["speed_up_low"],
                high=row["speed_up_high"],
                at_least=row["speed_up_at_least"],
                at_most=row["speed_up_at_most"],
                seeds=row["paired_seeds"],
            )
            for row in rows
        ],
        left_out=found.left_out,
    )


def _curve(label: str, runs: Sequence[RunSeries], metric: str, axis: Axis) -> comparison_schemas.ArmCurve:
    found = curve(label, runs, metric, axis)
    columns = {
        name: [_plain(value) for value in values]
        for name, values in (("x", found.x), ("y", found.y), ("low", found.low), ("high", found.high))
    }
    return comparison_schemas.ArmCurve(label=label, runs=[run.name for run in runs], **columns)


def _records(columns: Columns, metric: str) -> list[dict[str, Any]]:
    """Step records of the evaluated steps, and of those in which a pool changed: counts and seconds are those since the
    record before, so that a long run is few records. A metric of every step is its mean over the last STEPS.
    """
    column = columns.column(metric)
    assert column is not None
    marks = np.asarray(column, np.float64)
    kept = np.flatnonzero(np.isfinite(marks))
    if not metric.startswith("eval/"):
        marks = marks.copy()
        marks[kept] = _trailing_means(marks[kept])
        kept = kept[np.unique(np.linspace(0, kept.size - 1, min(kept.size, POINTS)).round().astype(int))]
    asked = kept
    sizes = [np.nan_to_num(found) for name in _SIZES if (found := columns.column(name)) is not None]
    for size in sizes:
        kept = np.union1d(kept, np.flatnonzero(size[1:] != size[:-1]))
    single = {name: found for name in ("elapsed", "eval/rows", *_SIZES) if (found := columns.column(name)) is not None}
    shown = np.isin(np.arange(marks.size), asked)
    single[metric] = np.where(shown, marks, np.nan)
    summed = {
        name: np.diff(np.cumsum(np.nan_to_num(np.asarray(found, np.float64)))[kept], prepend=0.0)
        for name in _SUMMED
        if (found := columns.column(name)) is not None
    }
    records = []
    for place, row in enumerate(kept.tolist()):
        record: dict[str, Any] = {"step": int(columns.steps[row])}
        record |= {name: float(values[row]) for name, values in single.items() if np.isfinite(values[row])}
        record |= {name: float(values[place]) for name, values in summed.items()}
        records.append(record)
    return records


def _gpu_seconds(name: str, columns: Columns, config: Mapping[str, Any]) -> float | None:
    names = [name for name in ("elapsed", *_SIZES) if columns.column(name) is not None]
    if "elapsed" not in names:
        return None
    rows = np.stack([np.asarray(columns.column(name), np.float64) for name in names])
    rows = rows[:, np.isfinite(rows[0])]
    # between two changes of the pools' sizes the last step has it all: a long run is a handful of rows
    changes = np.any(np.nan_to_num(rows[1:, 1:]) != np.nan_to_num(rows[1:, :-1]), axis=0)
    ends = np.append(np.flatnonzero(changes), rows.shape[1] - 1) if rows.shape[1] else []
    records = [
        {"step": at} | {name: float(value) for name, value in zip(names, rows[:, end], strict=True) if value == value}
        for at, end in enumerate(ends)
    ]
    try:
        return _plain(RunSeries(name, records, config).points("elapsed", "gpu-seconds")[0][-1])
    except CurveError:  # its pools held no card, or it has no step yet
        return None


def _there(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) [k] where a metric has one."""
    column = columns.column(name)
    if column is None:
        return np.zeros(0, np.int64), np.zeros(0)
    finite = np.isfinite(column)
    return columns.steps[finite], column[finite].astype(np.float64)


def _means(values: np.ndarray) -> tuple[float | None, float | None]:
    """The mean of the last STEPS values, and the best mean of so many in a row; of all where there are fewer."""
    if not values.size:
        return None, None
    width = min(STEPS, values.size)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[width:] - sums[:-width]) / width
    return _plain(means[-1]), _plain(means.max())


def _trailing_means(values: np.ndarray) -> np.ndarray:
    """Means over the last STEPS values up to each; of the first ones over as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - STEPS, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _plain(value: float) -> float:
    return float(f"{value:.7g}")
