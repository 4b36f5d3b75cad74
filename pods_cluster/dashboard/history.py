"""The metrics of one run in memory: read once, followed, and shown from the first moment by a few hundred samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pods_cluster.dashboard.columns import Columns
from pods_cluster.dashboard.run_health import health_of
from pods_cluster.telemetry.health_report import HealthReport
from pods_cluster.telemetry.line_tail import LineTail, parse, sample_lines

PREVIEW_ABOVE = 2**19
"""A longer metrics file is shown by a sample of its lines until all of it is read."""
PREVIEW_LINES = 400
RECENT_ROWS = 20
"""Rows over which present rates are taken."""


class History:
    """`columns` hold what is known now: all steps, or while `progress` is below 1 a sample of them.

    `changed` are the steps told since the last `drain`. `reset`: curves that were fetched before are no longer right, as
    steps were taken back, the file was replaced, or only a part of it was known until now.
    """

    def __init__(self, path: Path) -> None:
        self.tail = LineTail(path)
        self.bad_lines = 0
        self.revision = 0
        self.changed: list[int] = []
        self.reset = False
        self._columns = Columns()
        self._first = True
        self._partly_shown = False
        self._preview = self._sample()
        self._health: tuple[int, HealthReport | None] = (-1, None)

    @property
    def columns(self) -> Columns:
        return self._preview or self._columns

    @property
    def progress(self) -> float:
        return self.tail.progress if self._first else 1.0

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes

    def advance(self, limit: int) -> bool:
        """Read on; whether anything was there."""
        restarts = self.tail.restarts
        try:
            lines = self.tail.poll(limit)
        except OSError:  # unreadable now; asked again at the next poll
            return False
        if self.tail.restarts != restarts:
            self._columns, self._preview, self._first = Columns(), self._sample(), True
            self.reset = True
        with np.errstate(over="ignore"):  # beyond 32 bits: infinite, and shown as no value
            for _, data in lines:
                self._take(parse(data))
        if lines:
            self.revision += 1
        if self._first and self.tail.caught_up:
            # curves fetched meanwhile hold a sample, or the first steps alone
            self.reset = self.reset or self._partly_shown
            self._first, self._partly_shown, self._preview = False, False, None
            self.changed.clear()
            self.revision += 1
        elif self._first:
            self._partly_shown = True
        return bool(lines)

    def drain(self) -> tuple[list[int], bool]:
        """Steps told since the last call, in order, and whether earlier ones were taken back."""
        changed, reset = self.changed, self.reset
        self.changed, self.reset = [], False
        return changed, reset

    def rates(self, rows: int = RECENT_ROWS) -> dict[str, float]:
        """Rates a second over the last rows, from counts and the time of the steps: steadier than one step's."""
        columns = self.columns
        seconds = columns.total("timing_s/step", rows)
        rates: dict[str, float] = {}
        if seconds:
            for name in ("rollouts/generated", "rollouts/scored", "rollouts/selected", "rollouts/trained",
                         "tokens/sampled", "tokens/trained", "updates", "data/prompts_served"):  # fmt: skip
                total = columns.total(name, rows)
                if total is not None:
                    rates[name] = float(f"{total / seconds:.6g}")
        trained = columns.total("rollouts/trained", rows)
        scored = columns.total("rollouts/scored", rows)
        if trained and scored is not None:
            rates["rollout_to_update_ratio"] = float(f"{scored / trained:.6g}")
        return rates

    def health(self) -> HealthReport | None:
        """The health rules' report on the newest steps; None before the first, and while only a sample is known."""
        if self._preview is not None:
            return None
        if self._health[0] != self.revision:
            self._health = (self.revision, health_of(self.columns))
        return self._health[1]

    def totals(self, names: list[str]) -> dict[str, float]:
        """Sums over the run of counts; none while only a part of the steps is known."""
        if self.progress < 1:
            return {}
        found = {name: self._columns.total(name) for name in names}
        return {name: total for name, total in found.items() if total is not None}

    def _sample(self) -> Columns | None:
        try:
            return preview(self.tail.path) if self.tail.path.stat().st_size > PREVIEW_ABOVE else None
        except OSError:
            return None

    def _take(self, value: dict[str, Any] | None) -> None:
        if value is None:
            self.bad_lines += 1
        elif "marker" in value:
            step = value.get("step")
            if value["marker"] == "resumed_from" and isinstance(step, int):
                self._columns.take_back(step)
                self.changed = [old for old in self.changed if old <= step]
                self.reset = True
        else:
            step = self._columns.put(value)
            if step is None:
                self.bad_lines += 1
            elif not self._first and (not self.changed or self.changed[-1] != step):
                self.changed.append(step)


def preview(path: Path) -> Columns | None:
    """A sample of a long file's steps. Of a step and a later line of an earlier one, a resume took back the first."""
    kept: list[dict[str, Any]] = []
    lowest: int | None = None
    for value in reversed(sample_lines(path, PREVIEW_LINES)):
        step = value.get("step")
        if "marker" in value or not isinstance(step, int):
            continue
        if lowest is None or step <= lowest:
            kept.append(value)
            lowest = step
    columns = Columns()
    with np.errstate(over="ignore"):
        for value in reversed(kept):
            columns.put(value)
    return columns if columns.rows else None
