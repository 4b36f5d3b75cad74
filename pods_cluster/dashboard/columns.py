"""A run's metrics by column: one row a step, one array a metric, means and extremes of any range in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_METRICS = 2_000
"""Metrics that one run may have; names come from users' rewards."""
MAX_NONFINITE = 10_000
_FIRST_ROWS = 256
_WIDE = frozenset({"time", "elapsed", "num_tokens"})
"""Columns for which the seven digits of a 32-bit float are too few."""
_NO_METRICS = frozenset({"step", "nonfinite", "marker"})


@dataclass(slots=True)
class Curve:
    """One metric over buckets of rows; NaN where a bucket holds no value. `low` and `high` only where buckets hold
    more than one row.
    """

    mean: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(slots=True)
class Curves:
    """Metrics over shared buckets: `x` as asked for, `steps` (first and last of the range), rows a bucket."""

    x: np.ndarray
    bucket: int
    rows: int
    curves: dict[str, Curve]


class Columns:
    """Rows in rising step. `steps` are int64, metrics float32 (NaN: no value), wall clocks and token counts float64."""

    def __init__(self) -> None:
        self.rows = 0
        self.left_out = 0
        """Values of metrics beyond `MAX_METRICS`."""
        self.nonfinite: dict[str, list[int]] = {}
        """Steps at which a metric was NaN or infinite."""
        self._capacity = 0
        self._steps = np.zeros(0, np.int64)
        self._columns: dict[str, np.ndarray] = {}

    @property
    def steps(self) -> np.ndarray:
        return self._steps[: self.rows]

    @property
    def last_step(self) -> int | None:
        return int(self._steps[self.rows - 1]) if self.rows else None

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes + sum(column.nbytes for column in self._columns.values())

    def column(self, name: str) -> np.ndarray | None:
        column = self._columns.get(name)
        return None if column is None else column[: self.rows]

    def put(self, record: Mapping[str, Any]) -> int | None:
        """Take a step record (a step may be told in parts); its step, or None where it has none that counts."""
        step = record.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**62:
            return None
        row = self._row(step)
        columns = self._columns
        for name, value in record.items():
            if isinstance(value, (float, int)) and name not in _NO_METRICS:
                column = columns.get(name)
                if column is None:
                    column = self._new(name)
                    if column is None:
                        continue
                try:
                    column[row] = value
                except OverflowError:
                    column[row] = math.nan
        nonfinite = record.get("nonfinite")
        if isinstance(nonfinite, dict):
            for name in filter(str.isprintable, nonfinite):
                seen = self.nonfinite.setdefault(name, []) if len(self.nonfinite) < MAX_METRICS else []
                if len(seen) < MAX_NONFINITE:
                    seen.append(step)
        return step

    def take_back(self, step: int) -> None:
        """Forget all rows of steps above `step`: the run was resumed from there."""
        kept = int(np.searchsorted(self.steps, step, "right"))
        for column in self._columns.values():
            column[kept : self.rows] = np.nan
        self.rows = kept
        for name, steps in list(self.nonfinite.items()):
            self.nonfinite[name] = [old for old in steps if old <= step]
            if not self.nonfinite[name]:
                del self.nonfinite[name]

    def record(self, row: int = -1) -> dict[str, float | int]:
        """One row as a record: what has a finite value."""
        if not self.rows:
            return {}
        row = row if row >= 0 else self.rows + row
        values: dict[str, float | int] = {"step": int(self._steps[row])}
        for name, column in self._columns.items():
            value = float(column[row])
            if math.isfinite(value):
                values[name] = value if column.dtype == np.float64 else float(f"{value:.7g}")
        return values

    def latest(self, names: Iterable[str] | None = None, reach: int = 1000) -> dict[str, float]:
        """The newest value of each metric within the last `reach` rows (an evaluation comes now and then)."""
        values: dict[str, float] = {}
        for name in self._columns if names is None else names:
            column = self.column(name)
            if column is None:
                continue
            tail = column[-reach:]
            there = np.flatnonzero(np.isfinite(tail))
            if there.size:
                value = float(tail[there[-1]])
                values[name] = value if column.dtype == np.float64 else float(f"{value:.7g}")
        return values

    def total(self, name: str, rows: int | None = None) -> float | None:
        """Sum of a count over the run, or over its last rows."""
        column = self.column(name)
        if column is None or not column.size:
            return None
        part = column if rows is None else column[-rows:]
        finite = np.isfinite(part)
        return float(np.sum(part, dtype=np.float64, where=finite)) if finite.any() else None

    def curves(
        self, names: Iterable[str], *, start: int | None = None, end: int | None = None, points: int, x: str = "step"
    ) -> Curves:
        """Metrics from step `start` to step `end`, both included, in at most `points` buckets.

        A bucket is a power of two of rows and begins at a multiple of it, so that new rows change the last one alone.
        """
        steps = self.steps
        low = 0 if start is None else int(np.searchsorted(steps, start, "left"))
        high = self.rows if end is None else int(np.searchsorted(steps, end, "right"))
        if high <= low:
            return Curves(np.zeros(0), 1, 0, {name: Curve(np.zeros(0)) for name in names})
        bucket = 1
        while (high - 1) // bucket - low // bucket + 1 > points:
            bucket *= 2
        edges = np.arange(low // bucket, (high - 1) // bucket + 1, dtype=np.int64) * bucket
        edges[0] = low
        edges -= low
        along = steps if x == "step" else self.column(x)
        if along is None:
            along = np.full(self.rows, np.nan)
        curves: dict[str, Curve] = {}
        for name in names:
            column = self.column(name)
            if column is None:
                column = np.full(self.rows, np.nan, np.float32)
            curves[name] = _reduce(column[low:high], edges, bucket)
        return Curves(_reduce(along[low:high], edges, bucket).mean, bucket, high - low, curves)

    def _row(self, step: int) -> int:
        last = self._steps[self.rows - 1] if self.rows else -1
        if step == last:
            return self.rows - 1
        if step > last:
            self._reserve(self.rows + 1)
            self._steps[self.rows] = step
            self.rows += 1
            return self.rows - 1
        row = int(np.searchsorted(self.steps, step, "left"))
        if self._steps[row] != step:  # out of order: no run writes so, but nothing is lost
            self._reserve(self.rows + 1)
            self._steps[row + 1 : self.rows + 1] = self._steps[row : self.rows].copy()
            self._steps[row] = step
            for column in self._columns.values():
                column[row + 1 : self.rows + 1] = column[row : self.rows].copy()
                column[row] = np.nan
            self.rows += 1
        return row

    def _new(self, name: str) -> np.ndarray | None:
        if len(self._columns) >= MAX_METRICS or len(name) > 300 or not name.isprintable():
            self.left_out += 1
            return None
        column = np.full(self._capacity, np.nan, np.float64 if name in _WIDE else np.float32)
        self._columns[name] = column
        return column

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        # a quarter more: one metric's column of 100,000 steps is 0.4 MB, and there are a hundred of them
        capacity = max(rows, _FIRST_ROWS, self._capacity + self._capacity // 4)
        for name, old in self._columns.items():
            column = np.full(capacity, np.nan, old.dtype)
            column[: self.rows] = old[: self.rows]
            self._columns[name] = column
        steps = np.zeros(capacity, np.int64)
        steps[: self.rows] = self._steps[: self.rows]
        self._steps = steps
        self._capacity = capacity


def _reduce(values: np.ndarray, edges: np.ndarray, bucket: int) -> Curve:
    values = values.astype(np.float64)
    values[~np.isfinite(values)] = np.nan
    if bucket == 1:
        return Curve(values)
    there = ~np.isnan(values)
    count = np.add.reduceat(there.astype(np.int64), edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(there, values, 0.0), edges) / count
        return Curve(mean, np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges))


def plain(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """A number as JSON takes it: six significant digits, NaN as null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(values)))
    places = np.where(np.isfinite(places), places, 0.0)
    # a power of ten beyond 22 is no exact float: the numbers there are left as they are
    scale = 10.0 ** np.clip(places, 0, 22)
    rounded = np.where(places > 22, values, np.round(values * scale) / scale)
    return [None if value != value else value for value in rounded.tolist()]
