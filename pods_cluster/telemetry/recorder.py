"""The recorder of a run: checks and completes its metrics and events, and passes them on to the sinks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.health import Health
from pods_cluster.telemetry.metric_registry import MetricValueError, Registry
from pods_cluster.telemetry.ratios import Totals
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.sink_queue import SinkQueue
from pods_cluster.telemetry.sinks import JsonlSink, Sink
from pods_cluster.telemetry.step_record import (
    RESERVED,
    Feed,
    Record,
    SampleGroup,
    number,
    resume_marker,
    sample_record,
    step_record,
)
from pods_cluster.telemetry.tracker_sinks import trackers

logger = logging.getLogger(__name__)
Level = Literal["info", "warning", "error"]
KEPT_ITEMS = 1024
"""Items kept in memory for `poll`, whose callers ask every second or so: a step's record takes about 17 kB, a sample more."""


class Recorder:
    """Takes steps, events and samples; never raises into training and never waits for a sink.

    With `strict` (default: the environment variable PODS_STRICT_METRICS=1, as in tests) an unknown metric and a value
    that is no number raise; otherwise they are told once as a warning event: the unknown one is written all the same,
    the value that is no number left out.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        totals: Totals | None = None,
        elapsed: float = 0.0,
        strict: bool | None = None,
        metrics: Registry = registry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.totals = totals or Totals()
        self.run_health = Health()
        self._strict = os.environ.get("PODS_STRICT_METRICS") == "1" if strict is None else strict
        self._metrics = metrics
        self._clock = clock
        self._started = time.monotonic() - elapsed
        self._told: set[str] = set()
        self._recent: deque[tuple[str, Record]] = deque(maxlen=KEPT_ITEMS)
        self._count = 0
        self._step: int | None = None
        self._lock = threading.Lock()
        self._held = contextlib.ExitStack()
        self._folder: RunFolder | None = None
        self._sinks = SinkQueue(sinks, lambda key, text: self._tell_once(key, "telemetry", text))

    @classmethod
    def for_run(
        cls,
        folder: RunFolder,
        *,
        resumed_from: int | None = None,
        tensorboard: bool = False,
        wandb: bool = False,
        mlflow: bool = False,
        trackio: bool = False,
        config: Mapping[str, Any] | None = None,
        strict: bool | None = None,
    ) -> Recorder:
        """The recorder of a run's folder, which it holds locked until `close`.

        `resumed_from`: the step of the checkpoint that the run goes on from; metrics and samples of later steps are
        taken back, totals and `elapsed` go on from there. `config` is shown by the trackers. Raises RunFolderError
        (another process writes there) and SinkUnavailable (a package is missing).
        """
        with contextlib.ExitStack() as held:
            held.enter_context(folder.lock())
            written = folder.read_metrics() if resumed_from is not None else []
            standing = [record for record in written if record["step"] <= (resumed_from or 0)]
            wanted = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}
            sinks = trackers(folder, [name for name, on in wanted.items() if on], config, purge_after=resumed_from)
            elapsed = max((record["elapsed"] for record in standing), default=0.0)
            recorder = cls(totals=Totals(standing), elapsed=elapsed, strict=strict)
            recorder.run_health.remember(standing)
            jsonl = JsonlSink(folder, on_warning=recorder._sink_warning)
            if resumed_from is not None:
                jsonl.take_back(resume_marker(resumed_from, recorder._clock()))
            # the queue is still empty, so the thread has not read the list
            recorder._sinks.sinks = [jsonl, *sinks]
            recorder._held = held.pop_all()
            recorder._folder = folder
        if resumed_from is not None:
            recorder._step = resumed_from
            recorder.event("resumed_from", f"resumed from the checkpoint of step {resumed_from}", step=resumed_from)
        for sink in sinks:
            if note := getattr(sink, "note", ""):
                recorder.event(sink.name, note, level=getattr(sink, "level", "info"))
        return recorder

    @property
    def dropped(self) -> int:
        """Items given up because the sinks were too far behind."""
        return self._sinks.dropped

    @property
    def elapsed(self) -> float:
        """Seconds that the run has been working."""
        return time.monotonic() - self._started

    def step(self, step: int, values: Mapping[str, Any]) -> Record:
        """Record metrics of a step (a step may be told in parts); returns the record with what follows from it.

        Ratios and rates are computed from the counts where the values do not hold them. Raises UnknownMetric and
        MetricValueError only where strict.
        """
        self._step = step
        unknown = self._metrics.unknown(values)
        if unknown and self._strict:
            self._metrics.check(values)
        for name in unknown:
            self._tell_once(
                f"unknown:{name}", "unknown_metric", f"{name!r} is not a registered metric (written all the same)"
            )
        values = self._numbers(values)
        completed = {**self.totals.add(values), **self._health(), **values}
        record = step_record(step, completed, time=self._clock(), elapsed=self.elapsed)
        record |= self.run_health.tell(record, self)
        self._keep("step", record)
        self._sinks.put("write_step", record)
        return record

    def event(self, kind: str, text: str, *, level: Level = "info", step: int | None = None, **fields: Any) -> Record:
        """Record that something happened. `kind` is one word for machines, `text` a sentence for people."""
        event: Record = {
            "time": round(self._clock(), 3),
            "elapsed": round(self.elapsed, 3),
            "step": self._step if step is None else step,
            "kind": kind,
            "level": level,
            "text": text,
        }
        event.update({name: value for name, value in fields.items() if name not in event})
        self._keep("event", event)
        self._sinks.put("write_event", event)
        return event

    def take_back(self, step: int) -> None:
        """Take back what was recorded of steps above `step`: the run goes on from there. It waits for the sinks."""
        self._sinks.put("take_back", resume_marker(step, self._clock()))
        self.flush()
        standing = self._folder.read_metrics() if self._folder is not None else []
        self.totals, self.run_health, self._step = Totals(standing), Health(), step
        self.run_health.remember(standing)

    def warning(self, kind: str, text: str, **fields: Any) -> Record:
        """An event that a person should look at."""
        return self.event(kind, text, level="warning", **fields)

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Keep whole groups of rollouts for people to read."""
        now, elapsed = self._clock(), self.elapsed
        self._sinks.put("write_samples", [sample_record(step, group, time=now, elapsed=elapsed) for group in groups])

    def evaluation(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep what each held-out row of an evaluation came to (see `RunFolder.read_evals`)."""
        self._sinks.put("write_evals", [{"step": int(step), **row} for row in rows])

    def poll(self, cursor: int = 0) -> Feed:
        """Steps and events since `cursor` (0: all that are still in memory)."""
        with self._lock:
            first = self._count - len(self._recent)
            start = max(cursor, first)
            items = list(self._recent)[start - first :]
            return Feed(self._count, items, start - cursor)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything told before is with the sinks; false at the timeout."""
        return self._sinks.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Hand over what waits, close the sinks and free the folder; one that hangs is left behind at the timeout."""
        self._sinks.close(timeout)
        self._held.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that are numbers; the others raise where strict, else they are told once."""
        kept: dict[str, Any] = {}
        for name, value in values.items():
            try:
                if name in RESERVED:
                    raise MetricValueError(f"{name}: is set by the recorder; leave it out of the values")
                kept[name] = number(name, value)
            except MetricValueError as error:
                if self._strict:
                    raise
                self._tell_once(f"value:{name}", "bad_metric", f"left out: {error}")
        return kept

    def _health(self) -> dict[str, int]:
        """Telemetry's own troubles, where it has any."""
        found = {
            "telemetry/failed_writes": self._sinks.failed_writes,
            "telemetry/dropped_lines": self._sinks.dropped_lines,
        }
        return {name: count for name, count in found.items() if count}

    def _tell_once(self, key: str, kind: str, text: str) -> None:
        if key not in self._told and len(self._told) < 1000:
            self._told.add(key)
            logger.warning("telemetry: %s", text)
            self.warning(kind, text)

    def _sink_warning(self, text: str) -> None:
        logger.warning("telemetry: %s", text)
        self.warning("telemetry", text)

    def _keep(self, what: str, record: Record) -> None:
        with self._lock:
            self._recent.append((what, record))
            self._count += 1
