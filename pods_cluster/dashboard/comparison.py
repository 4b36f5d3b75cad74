"""Runs side by side: the settings in which they differ, and what each came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pods_cluster.dashboard import schemas
from pods_cluster.dashboard.columns import Columns
from pods_cluster.dashboard.run_view import RunView
from pods_cluster.telemetry.curves import CurveError, RunSeries
from pods_cluster.telemetry.settings import differing

STEPS = 10
"""Steps over which a reward is averaged: one step's is mostly noise."""
ACCURACIES = ("eval/greedy_accuracy", "eval/sampled_accuracy")
_SIZES = ("generator/workers", "learner/workers")


def figures(view: RunView) -> schemas.Figures:
    """What a run came to, from the steps that are read so far."""
    config = view.config()[1]
    with view.lock:
        columns = view.history.columns
        accuracy = next((values for name in ACCURACIES if (values := _there(columns, name))[1].size), None)
        reward_final, reward_best = _means(_there(columns, "reward")[1])
        latest = columns.latest(["elapsed", "rollout_to_update_ratio/cumulative"])
        best = int(np.argmax(accuracy[1])) if accuracy else 0
        totals = view.history.totals(["rollouts/scored", "rollouts/trained", "tokens/sampled"])
        return schemas.Figures(
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


def differences(configs: Sequence[Mapping[str, Any]]) -> list[schemas.SettingDifference]:
    """The settings in which the configurations differ, by their path, in the order of the first that has them."""
    return [schemas.SettingDifference(name=name, values=values) for name, values in differing(configs).items()]


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


def _plain(value: float) -> float:
    return float(f"{value:.7g}")
