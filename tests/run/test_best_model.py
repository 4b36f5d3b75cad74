"""The model of the best evaluation: kept while it is the best, replaced by a better one, remembered over a resume."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import ConfigError
from pods_cluster.run.best_model import FILE, BestModel
from pods_cluster.telemetry.run_folder import RunFolder
from tests.run.parts import loop_config

METRIC = "eval/greedy_accuracy"


class Kept:
    """A best model in a run's folder whose export writes the step's number."""

    def __init__(self, path: Path, metric: str | None = METRIC) -> None:
        self.folder, self.told, self.full = RunFolder(path), [], False  # type: ignore[var-annotated]
        self.step = 0
        self.best = BestModel(metric, self.folder, self._export, self._notice)

    async def _export(self, path: Path) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        path.mkdir(parents=True)
        (path / "config.json").write_text(str(self.step))

    def _notice(self, kind: str, text: str, *, level: str = "info") -> None:
        self.told.append((level, text))

    def evaluate(self, step: int, value: float, name: str = METRIC) -> None:
        self.step = step
        asyncio.run(self.best.after_evaluation(step, {name: value}))

    @property
    def kept(self) -> tuple[str, Any]:
        note = json.loads((self.folder.best / FILE).read_text())
        return (self.folder.best / "config.json").read_text(), (note["step"], note["value"])


def test_a_better_evaluation_replaces_the_model(tmp_path: Path) -> None:
    run = Kept(tmp_path)
    for step, value in ((10, 0.4), (20, 0.6), (30, 0.5), (40, 0.6), (50, math.nan)):
        run.evaluate(step, value)
    assert run.kept == ("20", (20, 0.6))
    assert [text.partition(" is ")[0] for _, text in run.told] == ["step 10", "step 20"]
    assert not run.folder.best.with_name("best.tmp").exists()

    resumed = Kept(tmp_path)
    resumed.evaluate(60, 0.55)
    assert resumed.kept[0] == "20", "a resumed run knows what was best"
    resumed.evaluate(70, 0.7)
    assert resumed.kept[0] == "70"
    other = Kept(tmp_path, "eval/reward")
    other.evaluate(80, 0.1, "eval/reward")
    assert other.kept[0] == "80", "by another metric nothing was the best yet"


def test_a_full_disk_costs_this_model_alone(tmp_path: Path) -> None:
    run = Kept(tmp_path)
    run.evaluate(10, 0.4)
    run.full = True
    run.evaluate(20, 0.5)
    assert run.kept[0] == "10"
    assert run.told[-1][0] == "warning"
    assert "No space left on device" in run.told[-1][1]
    run.full = False
    run.evaluate(30, 0.45)
    assert run.kept[0] == "30", "the one that was not written is not the best"


def test_without_a_metric_or_evaluations(tmp_path: Path) -> None:
    run = Kept(tmp_path, None)
    run.evaluate(10, 0.4)
    assert not run.folder.best.exists()
    with pytest.raises(
        ConfigError, match=r"run\.checkpoint\.best: 'eval/reward' is never measured without evaluations"
    ):
        loop_config("run.checkpoint.best=eval/reward")
    with pytest.raises(ConfigError, match=r"run\.checkpoint\.best: 'reward' is refused"):
        loop_config("run.checkpoint.best=reward")
