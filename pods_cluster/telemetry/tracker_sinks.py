"""Sinks of experiment trackers beside Weights & Biases: MLflow and trackio. Both keep a run here unless told of a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pods_cluster.telemetry.number_format import first_line
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.secret_values import without_secrets
from pods_cluster.telemetry.settings import flat
from pods_cluster.telemetry.sinks import Sink, SinkUnavailable, TensorBoardSink, Tracker, WandbSink, require, scalars
from pods_cluster.telemetry.step_record import Record

PROJECT = "pods-cluster"
MLFLOW_RUN = "mlflow-run.txt"
"""In the run's folder: the id of its MLflow run, which a resume goes on with."""
PARAMETER_LENGTH = 500
"""MLflow refuses longer values."""


class MlflowSink(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI, else under `<run>/mlruns`. Raises SinkUnavailable when made."""

    name = "mlflow"

    def __init__(self, folder: RunFolder, config: Mapping[str, Any] | None = None) -> None:
        mlflow = require("mlflow", "mlflow", "mlflow", "run.mlflow")
        self._entities = require("mlflow.entities", "mlflow", "mlflow", "run.mlflow")
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (folder.path / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it beside its databases
        try:
            self._client = mlflow.MlflowClient(address)
            self._run = self._run_of(folder, config or {})
        except Exception as error:  # a server that cannot be reached, or refuses: MLflow has many kinds
            raise SinkUnavailable(
                f"run.mlflow: MLflow at {without_secrets(address)} cannot be used ({first_line(error)}); correct "
                f"MLFLOW_TRACKING_URI, or turn run.mlflow off"
            ) from error
        self.note = f"MLflow has the run at {without_secrets(address)} (experiment {PROJECT}, run {self._run})"

    def _run_of(self, folder: RunFolder, config: Mapping[str, Any]) -> str:
        file = folder.path / MLFLOW_RUN
        if file.is_file():
            known = file.read_text(encoding="utf-8").strip()
            with contextlib.suppress(Exception):  # gone from the server: a new one is made
                self._client.update_run(known, status="RUNNING")
                return known
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(PROJECT)
        run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        parameters = [
            self._entities.Param(name, str(value)[:PARAMETER_LENGTH])
            for name, value in _shown(config).items()
            if value is not None
        ]
        for start in range(0, len(parameters), 100):  # the most that MLflow takes at once
            self._client.log_batch(run, params=parameters[start : start + 100])
        file.write_text(run + "\n", encoding="utf-8")
        return run

    def write_step(self, record: Record) -> None:
        moment = round(record["time"] * 1000)
        metrics = [
            self._entities.Metric(_allowed(name), float(value), moment, record["step"])
            for name, value in {**scalars(record), "elapsed": record["elapsed"]}.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def write_event(self, event: Record) -> None:
        if event.get("level") != "info":
            self._client.set_tag(self._run, f"event.{event['kind']}", event["text"][:PARAMETER_LENGTH])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TrackioSink(Tracker):
    """trackio, in its own folder (TRACKIO_DIR) or, where TRACKIO_SPACE_ID is set, in that Space. Raises SinkUnavailable."""

    name = "trackio"

    def __init__(self, folder: RunFolder, config: Mapping[str, Any] | None = None) -> None:
        trackio = require("trackio", "trackio", "trackio", "run.trackio")
        space = os.environ.get("TRACKIO_SPACE_ID") or None
        try:
            # started in a server process, on a machine that others may use: no display, no metrics of the machine
            self._run = trackio.init(
                project=PROJECT,
                name=folder.name,
                space_id=space,
                config=_shown(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:
            raise SinkUnavailable(
                f"run.trackio: trackio cannot start the run ({first_line(error)}); correct TRACKIO_SPACE_ID, or turn "
                f"run.trackio off"
            ) from error
        shown = f"in the Space {space}" if space else f'here; see it with: trackio show --project "{PROJECT}"'
        self.note = f"trackio keeps the run {shown}"

    def write_step(self, record: Record) -> None:
        self._run.log({"elapsed": record["elapsed"], **scalars(record)}, step=record["step"])

    def write_event(self, event: Record) -> None:
        pass  # events are read in events.jsonl

    def close(self) -> None:
        self._run.finish()


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their path, without secrets; lists as one text each."""
    settings = flat(without_secrets(config))
    return {name: str(value) if isinstance(value, list | tuple) else value for name, value in settings.items()}


def _allowed(name: str) -> str:
    """A metric's name without what MLflow does not take."""
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name)


def trackers(
    folder: RunFolder, names: Iterable[str], config: Mapping[str, Any] | None, *, purge_after: int | None
) -> list[Sink]:
    """The trackers of these names (`tensorboard`, `wandb`, `mlflow`, `trackio`); `purge_after`: the step of a resume.

    Raises SinkUnavailable.
    """
    make: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(folder, purge_after=purge_after),
        "wandb": lambda: WandbSink(folder, config),
        "mlflow": lambda: MlflowSink(folder, config),
        "trackio": lambda: TrackioSink(folder, config),
    }
    return [make[name]() for name in names]
