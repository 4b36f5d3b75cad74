"""Calibration for `pods plan`: measures the rates of the run's own pools over a few of its steps."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import ray

from pods_cluster.client.paths import absolute
from pods_cluster.config import Config, build_config
from pods_cluster.run.cluster import connect
from pods_cluster.run.controller import Controller
from pods_cluster.sizing.step_measurement import StepMeasurement
from pods_cluster.telemetry.run_folder import RunFolder


def calibration_config(config: Config, folder: Path, *, steps: int, groups: int | None) -> Config:
    """The run's own pools, model and prompts for a few synchronous steps that always train and leave nothing behind.

    `groups` is how many prompts a step has, where that is to be fewer than `learner.prompts_per_step`. Raises
    ConfigError where the pools cannot work on so few.
    """
    tree: dict[str, Any] = absolute(config).model_dump(mode="json")
    tree["staleness"] = 0
    tree["generator"]["rollouts_range"] = None
    tree["selector"] |= {"settle": "off", "no_signal": "keep"}
    tree["learner"]["warmup_steps"] = min(config.learner.warmup_steps, steps)
    if groups is not None:
        tree["learner"]["prompts_per_step"] = min(groups, config.learner.prompts_per_step)
    tree["run"] |= {
        "name": f"{config.run.name}-plan",
        "dir": str(folder),
        "steps": steps,
        "epochs": None,
        "samples_every": 0,
        "export": False,
        "push_to_hub": None,
        "tensorboard": False,
        "wandb": False,
        "mlflow": False,
        "trackio": False,
    }
    tree["run"]["eval"]["every"] = tree["run"]["checkpoint"]["every"] = 0
    return build_config(tree)


def calibrate(config: Config, *, steps: int = 4, groups: int | None = None) -> list[StepMeasurement]:
    """Start both pools, run the steps, end the pools, and read the step records.

    Raises ConfigError, ClusterError and what a stage raises.
    """
    owned = not ray.is_initialized()
    with tempfile.TemporaryDirectory(prefix="pods-plan-") as folder:
        short = calibration_config(config, Path(folder), steps=steps, groups=groups)
        connect(short)
        try:
            return asyncio.run(_measure(short))
        finally:
            if owned:
                ray.shutdown()


async def _measure(config: Config) -> list[StepMeasurement]:
    controller = Controller(config, resume=False, save=False)
    await controller.run()
    return _steps(controller.folder)


def steps_of_run(folder: Path) -> list[StepMeasurement]:
    """Steps of a finished (or running) run. Raises RunFolderError."""
    return _steps(RunFolder.open(folder))


def _steps(folder: RunFolder) -> list[StepMeasurement]:
    return [StepMeasurement.from_record(record) for record in folder.read_metrics()]
