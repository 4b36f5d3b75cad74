"""The sinks of telemetry: JSON lines always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import importlib
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pods_cluster.telemetry.jsonl import JsonLinesWriter
from pods_cluster.telemetry.number_format import first_line
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.secret_values import without_secrets
from pods_cluster.telemetry.step_record import Record


class SinkUnavailable(Exception):
    """A sink that was asked for needs a package that is not installed; the text names the extra."""


class Sink(Protocol):
    """Takes what the recorder was told, on the recorder's own thread. May raise: the recorder counts and goes on."""

    name: str

    def write_step(self, record: Record) -> None: ...

    def write_event(self, event: Record) -> None: ...

    def write_samples(self, groups: list[Record]) -> None: ...

    def write_evals(self, rows: list[Record]) -> None: ...

    def take_back(self, marker: Record) -> None:
        """The run goes on from the marker's step: what was written of later ones does not stand."""
        ...

    def retry(self) -> None:
        """Called now and then while nothing is written, and by `Recorder.flush`."""
        ...

    def close(self) -> None: ...


class JsonlSink:
    """metrics.jsonl, events.jsonl, samples.jsonl and evals.jsonl of the run's folder."""

    name = "jsonl"

    def __init__(self, folder: RunFolder, on_warning: Callable[[str], None] | None = None) -> None:
        self.metrics = JsonLinesWriter(folder.metrics, on_warning=on_warning)
        self.events = JsonLinesWriter(folder.events, on_warning=on_warning)
        self.samples = JsonLinesWriter(folder.samples, on_warning=on_warning)
        self.evals = JsonLinesWriter(folder.evals, on_warning=on_warning)
        self._writers = (self.metrics, self.events, self.samples, self.evals)

    def write_step(self, record: Record) -> None:
        self.metrics.write(record)

    def write_event(self, event: Record) -> None:
        self.events.write(event)

    def write_samples(self, groups: list[Record]) -> None:
        for group in groups:
            self.samples.write(group)

    def write_evals(self, rows: list[Record]) -> None:
        for row in rows:
            self.evals.write(row)

    def take_back(self, marker: Record) -> None:
        """Take back the metrics, samples and evaluations of steps above the marker's."""
        self.metrics.write(marker)
        self.samples.write(marker)
        self.evals.write(marker)

    @property
    def failed_writes(self) -> int:
        return sum(writer.failed_writes for writer in self._writers)

    @property
    def dropped_lines(self) -> int:
        return sum(writer.dropped_lines for writer in self._writers)

    def retry(self) -> None:
        for writer in self._writers:
            writer.retry()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def require(module: str, package: str, extra: str, field: str) -> Any:
    """Import a tracker's module. Raises SinkUnavailable, naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SinkUnavailable(
            f"{field}: the package {package!r} is not installed ({error}); "
            f"pip install 'pods-cluster[{extra}]', or turn {field} off"
        ) from None


class TensorBoardSink:
    """Scalars by metric name, events as text, under `<run>/tensorboard`. Raises SinkUnavailable when made."""

    name = "tensorboard"

    def __init__(self, folder: RunFolder, *, purge_after: int | None = None) -> None:
        """`purge_after`: the step that a run is resumed from; TensorBoard hides what it had of later ones."""
        require("tensorboard", "tensorboard", "tensorboard", self.name)
        module = require("torch.utils.tensorboard", "tensorboard", "tensorboard", self.name)
        self._make_writer, self._path = module.SummaryWriter, str(folder.path / "tensorboard")
        self._writer = self._make_writer(self._path, purge_step=None if purge_after is None else purge_after + 1)

    def write_step(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"], walltime=record["time"])
        self._writer.flush()

    def write_event(self, event: Record) -> None:
        text = f"`{event['kind']}` {event['text']}"
        self._writer.add_text("events", text, global_step=event.get("step") or 0, walltime=event["time"])

    def write_samples(self, groups: list[Record]) -> None:
        pass  # whole groups are read in samples.jsonl

    def write_evals(self, rows: list[Record]) -> None:
        pass  # single rows are read in evals.jsonl; their means are metrics

    def take_back(self, marker: Record) -> None:
        self._writer.close()
        self._writer = self._make_writer(self._path, purge_step=marker["step"] + 1)

    def retry(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


WANDB_SECONDS = 60
"""How long a start may wait for Weights & Biases."""


class Tracker:
    """Base of the sinks that write to experiment trackers, all of which leave these parts out."""

    def write_samples(self, groups: list[Record]) -> None:
        pass  # prompts and completions stay in the run's folder

    def write_evals(self, rows: list[Record]) -> None:
        pass

    def take_back(self, marker: Record) -> None:
        pass  # steps that come again are shown twice

    def retry(self) -> None:
        pass


class WandbSink(Tracker):
    """Weights & Biases, with its files under `<run>/wandb`. Raises SinkUnavailable.

    `WANDB_MODE` decides where metrics go; left out, they are sent where an API key is known (`WANDB_API_KEY`, or `wandb
    login`), and stay here where none is. `note` says which.
    """

    name = "wandb"

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any] | None = None, *, project: str = "pods-cluster"
    ) -> None:
        wandb = require("wandb", "wandb", "wandb", self.name)
        settings = {"console": "off", "save_code": False, "silent": True, "init_timeout": WANDB_SECONDS}

        def start(mode: str) -> Any:
            # the recorder is one thread of a server process: no console capture, no code upload
            return wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder.path),
                config=without_secrets(dict(config or {})),
                mode=mode,
                settings=wandb.Settings(**settings),
            )

        mode = os.environ.get("WANDB_MODE") or ("online" if _wandb_key_is_known() else "offline")
        self.note, self.level = "", "info"
        try:
            self._run = start(mode)
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise SinkUnavailable(
                f"run.wandb: Weights & Biases refuses the run ({first_line(error)}); correct WANDB_API_KEY, or set "
                f"WANDB_MODE=offline to keep the metrics here"
            ) from error
        except wandb.errors.CommError as error:
            mode, self.level = "offline", "warning"
            self.note = f"Weights & Biases cannot be reached ({first_line(error)}). "
            self._run = start(mode)
        self.note += (
            f"Weights & Biases shows the run at {self._run.url}"
            if mode == "online"
            else f"Weights & Biases keeps the run here; send it with: wandb sync {Path(self._run.dir).parent}"
        )
        # steps may come in parts and, after a resume, again: W&B's own step only grows
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def directory(self) -> Path:
        return Path(self._run.dir)

    def write_step(self, record: Record) -> None:
        self._run.log({"step": record["step"], "elapsed": record["elapsed"], **scalars(record)})

    def write_event(self, event: Record) -> None:
        if event.get("level") != "info":
            self._run.alert(title=event["kind"], text=event["text"])

    def close(self) -> None:
        self._run.finish()


def _wandb_key_is_known() -> bool:
    """Whether an API key is set, or was kept by `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def scalars(record: Record) -> dict[str, float]:
    """The metrics of a record that have a finite value."""
    return {
        name: value
        for name, value in record.items()
        if name not in ("step", "time", "elapsed") and isinstance(value, (int, float))
    }
