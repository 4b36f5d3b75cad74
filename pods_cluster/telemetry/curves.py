"""Curves of runs for comparison: one metric against steps, time, GPU-seconds, rollouts or tokens, seeds joined (pure).

`minutes` is all the time that a run worked; `training-minutes` is its steps alone, which leaves out how long the start, the
evaluations and the checkpoints took.

Runs that differ in `run.seed`, `run.name` and `run.dir` alone are seeds of one arm. A band over seeds is the mean and
its 95 % t-interval on a common grid; a single run's accuracy has the 95 % Wilson interval of its held-out rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from pods_cluster.telemetry.step_record import Record, merge_steps

Axis = Literal["steps", "minutes", "training-minutes", "gpu-seconds", "rollouts", "tokens"]
AXES: tuple[Axis, ...] = get_args(Axis)
LABELS: dict[Axis, str] = {
    "steps": "learner step",
    "minutes": "wall clock (minutes)",
    "training-minutes": "training time (minutes)",
    "gpu-seconds": "GPU-seconds",
    "rollouts": "rollouts generated",
    "tokens": "tokens sampled",
}
GRID = 200
"""Points of the common grid of several seeds."""
# 97.5 % quantile of Student's t for 1, 2, … degrees of freedom; from 30 on the normal one is used.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
      2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip


class CurveError(Exception):
    """A curve that cannot be drawn; the text names the run, what it lacks and what to ask for instead."""


@dataclass(frozen=True, slots=True)
class RunSeries:
    """The series of one run: its records, one a step, and its resolved configuration as a tree."""

    name: str
    records: list[Record]
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> RunSeries:
        return cls(name, merge_steps(records), config)

    @property
    def seed(self) -> int | None:
        """`run.seed`, where the configuration is known."""
        seed = (self.config.get("run") or {}).get("seed")
        return seed if isinstance(seed, int) else None

    def points(self, metric: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """(x [k], y [k]) at the steps that have the metric, x rising. Raises CurveError."""
        xs = self._positions(axis)
        rows = [(x, record[metric]) for x, record in zip(xs, self.records, strict=True) if _is_number(record, metric)]
        if not rows:
            known = sorted({name for record in self.records for name in record})
            near = [name for name in known if metric.split("/")[-1] in name][:5]
            raise CurveError(
                f"{self.name}: no step has the metric {metric!r}" + (f"; it has {', '.join(near)}" if near else "")
            )
        x, y = np.array(rows, dtype=float).T
        return x, y

    def averaged(self, metric: str, steps: int) -> RunSeries:
        """The same run with the metric at each step as its mean over the last `steps` steps that have it: a single step's
        reward is mostly noise, and its highest value no best.
        """
        values: deque[float] = deque(maxlen=steps)
        records = []
        for record in self.records:
            if _is_number(record, metric):
                values.append(float(record[metric]))
                record = {**record, metric: sum(values) / len(values)}
            records.append(record)
        return RunSeries(self.name, records, self.config)

    def _positions(self, axis: Axis) -> list[float]:
        if axis == "steps":
            return [float(record["step"]) for record in self.records]
        if axis == "minutes":
            return [_number(record, "elapsed") / 60 for record in self.records]
        if axis == "training-minutes":  # without the start, evaluations and checkpoints
            return (np.cumsum([_number(record, "timing_s/step") for record in self.records]) / 60).tolist()
        if axis in ("rollouts", "tokens"):
            name = "rollouts/generated" if axis == "rollouts" else "tokens/sampled"
            return np.cumsum([_number(record, name) for record in self.records]).tolist()
        return self._gpu_seconds()

    def _gpu_seconds(self) -> list[float]:
        """Seconds of each step times the cards that the pools held in it."""
        generator, learner = self.config.get("generator") or {}, self.config.get("learner") or {}
        each = generator.get("gpus_per_worker")
        if each is None:
            each = generator.get("tensor_parallel", 1) if generator.get("engine") == "vllm" else 0
        rank = learner.get("gpus_per_worker") or 0
        total, before, spent = 0.0, 0.0, []
        for record in self.records:
            now = _number(record, "elapsed")
            workers = record.get("generator/workers", generator.get("workers", 1))
            ranks = record.get("learner/workers", learner.get("workers", 1))
            total += max(now - before, 0.0) * (workers * each + ranks * rank)
            before = now
            spent.append(total)
        if not total:
            raise CurveError(f"{self.name}: its pools held no GPU; ask for --x minutes")
        return spent


@dataclass(frozen=True, slots=True)
class Curve:
    """One arm: x, y [k] and the lower and upper end of its interval [k] (equal to y where there is none)."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def arms(runs: Sequence[RunSeries], labels: Sequence[str | None] = ()) -> dict[str, list[RunSeries]]:
    """Runs by arm, in the order given: by label where one is given, else runs that differ in their seed alone."""
    found: dict[str, list[RunSeries]] = {}
    seen: dict[str, str] = {}
    for at, run in enumerate(runs):
        label = labels[at] if at < len(labels) else None
        if label is None:
            key = repr(_without_seed(run.config)) if run.config else run.name
            label = seen.setdefault(key, run.name)
        found.setdefault(label, []).append(run)
    return found


def curve(label: str, runs: Sequence[RunSeries], metric: str, axis: Axis) -> Curve:
    """The curve of one arm. Raises CurveError."""
    points = [run.points(metric, axis) for run in runs]
    if len(points) == 1:
        x, y = points[0]
        low, high = _row_intervals(runs[0], metric, y)
        return Curve(label, x, y, low, high, 1)
    start, stop = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
    if start > stop:
        raise CurveError(f"{label}: its runs share no part of the {axis} axis; they cannot be averaged")
    same = all(len(x) == len(points[0][0]) and bool((x == points[0][0]).all()) for x, _ in points)
    grid = points[0][0] if same else np.linspace(start, stop, GRID)
    values = np.stack([np.interp(grid, x, y) for x, y in points])
    mean = values.mean(axis=0)
    freedom = len(points) - 1
    half = student_t(freedom) * values.std(axis=0, ddof=1) / math.sqrt(len(points))
    return Curve(label, grid, mean, mean - half, mean + half, len(points))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.96


def wilson(share: float, rows: float, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of `rows` independent rows (Wilson 1927)."""
    if rows <= 0:
        return share, share
    center = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    return max(0.0, center - half), min(1.0, center + half)


def _row_intervals(run: RunSeries, metric: str, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not metric.startswith("eval/") or not metric.endswith("accuracy"):
        return y, y
    rows = [_number(record, "eval/rows") for record in run.records if _is_number(record, metric)]
    ends = np.array([wilson(float(share), count) for share, count in zip(y, rows, strict=True)])
    return ends[:, 0], ends[:, 1]


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    tree = {name: value for name, value in sorted(config.items()) if name != "run"}
    run = {name: value for name, value in (config.get("run") or {}).items() if name not in ("seed", "name", "dir")}
    return tree | {"run": dict(sorted(run.items()))}


def _is_number(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(record: Mapping[str, Any], name: str) -> float:
    return float(record[name]) if _is_number(record, name) else 0.0
