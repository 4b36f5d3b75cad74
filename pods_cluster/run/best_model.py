"""The model of the evaluation that was best so far, kept in the run's folder beside the newest checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from pods_cluster.learning.reports import StorageError
from pods_cluster.sizing.pools import Notice
from pods_cluster.telemetry.run_folder import RunFolder

FILE = "best.json"
"""In the model's folder: the metric, its value and the step."""


class BestModel:
    """Exports the model to `best/` after an evaluation whose `metric` is higher than all before, and replaces the one there.

    A resumed run goes on from the value that lies there. A disk that does not take the model costs this one alone.
    """

    def __init__(
        self, metric: str | None, folder: RunFolder, export: Callable[[Path], Awaitable[None]], notice: Notice
    ) -> None:
        self._metric, self._folder, self._export, self._notice = metric, folder.best, export, notice
        self.value = _kept(folder.best, metric)

    async def after_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the model that was evaluated, if it is the best."""
        value = values.get(self._metric or "")
        if self._metric is None or value is None or not math.isfinite(value) or value <= self.value:
            return
        temporary = self._folder.with_name(f"{self._folder.name}.tmp")
        try:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
            await self._export(temporary)
            await asyncio.to_thread(self._put_in_place, temporary, step, value)
        except (StorageError, OSError) as error:
            text = f"the model of step {step} ({self._metric} {value:.4g}) could not be written to {self._folder} ({error})"
            self._notice("best_model", f"{text}; training goes on", level="warning")
            return
        self.value = value
        self._notice(
            "best_model", f"step {step} is the best so far ({self._metric} {value:.4g}): its model is in best/"
        )

    def _put_in_place(self, temporary: Path, step: int, value: float) -> None:
        note = {"metric": self._metric, "value": value, "step": step}
        (temporary / FILE).write_text(json.dumps(note) + "\n", encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        temporary.rename(self._folder)


def _kept(folder: Path, metric: str | None) -> float:
    """The value of the model that lies there by the same metric, else minus infinity."""
    try:
        note = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return float(note["value"]) if note["metric"] == metric else -math.inf
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
