"""One run as the dashboard sees it: its history, events, samples, configuration and state."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from pods_cluster.dashboard.history import History
from pods_cluster.dashboard.journal import Journal, event_entry, sample_entry
from pods_cluster.telemetry.line_tail import clean, newest, read_json
from pods_cluster.telemetry.run_folder import RunFolder

Status = Literal["running", "finished", "stopped", "failed", "silent"]
SLICE_BYTES = 2**19
"""Read at a time, so that a request waits for some milliseconds only."""
SILENT_AFTER = 120.0
"""Seconds without a line after which a run that nobody is seen to write counts as silent."""
MAX_ROWS_TOLD = 20
"""Steps told at once; a page that hears of more fetches its curves again."""
_SECRET = re.compile(r"token$|secret|password|passwd|credential|api_?key|authorization", re.IGNORECASE)


class Change(NamedTuple):
    """What a run wrote since the last look."""

    rows: list[dict[str, float | int]]
    events: list[dict[str, Any]]
    samples: int
    reset: bool

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.samples or self.reset)


class RunView:
    """Everything is read under `lock`: requests and the watcher come from several threads."""

    def __init__(self, folder: RunFolder, run_id: str) -> None:
        self.folder = folder
        self.id = run_id
        self.lock = threading.RLock()
        self.history = History(folder.metrics)
        self.events = Journal(folder.events, event_entry, superseded=False)
        self.samples = Journal(folder.samples, sample_entry, superseded=True)
        self.levels: Counter[str] = Counter()
        self.worker_events: list[dict[str, Any]] = []
        self.used = time.monotonic()
        self._ended: dict[str, Any] | None = None
        self._config: tuple[float, str, dict[str, Any]] = (-1.0, "", {})

    def advance(self, limit: int = SLICE_BYTES) -> Change:
        """Read what was written since, a slice at most."""
        with self.lock:
            self.history.advance(limit)
            events: list[dict[str, Any]] = []
            restarts = self.events.tail.restarts
            for entry, raw in self.events.advance(limit):
                line = clean(raw)
                events.append({**line, "id": entry.offset})
                self._note(line)
            if self.events.tail.restarts != restarts:
                self.levels = Counter(entry.level for entry in self.events.entries)
            samples = len(self.samples.advance(limit))
            steps, reset = self.history.drain()
            if len(steps) > MAX_ROWS_TOLD:
                steps, reset = steps[-1:], True
            columns = self.history.columns
            rows = []
            for step in dict.fromkeys(steps):
                row = int(columns.steps.searchsorted(step))
                if row < columns.rows and int(columns.steps[row]) == step:
                    rows.append(columns.record(row))
            return Change(rows, events[-MAX_ROWS_TOLD:], samples, reset)

    @property
    def loading(self) -> bool:
        return not (self.history.progress >= 1.0 and self.events.tail.caught_up and self.samples.tail.caught_up)

    @property
    def nbytes(self) -> int:
        entries = len(self.events.entries) * 120 + len(self.samples.entries) * 260
        return self.history.nbytes + entries

    def config(self) -> tuple[str, dict[str, Any]]:
        """config.yaml as text and as a tree, values that look like secrets left out of both."""
        path = self.folder.config
        try:
            modified = path.stat().st_mtime
            if modified != self._config[0]:
                tree = yaml.safe_load(path.read_text(encoding="utf-8"))
                tree = clean(_without_secrets(tree)) if isinstance(tree, dict) else {}
                text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
                self._config = (modified, text, tree)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return "", {}
        return self._config[1], self._config[2]

    def steps_planned(self) -> int | None:
        steps = (self.config()[1].get("run") or {}).get("steps")
        return steps if isinstance(steps, int) else None

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.folder.summary)

    def status(self, now: float | None = None) -> tuple[Status, str]:
        """The run's state in one word and in a sentence."""
        with self.lock:
            return _state(self.folder, self._ended, now)

    def _note(self, event: dict[str, Any]) -> None:
        self.levels[event.get("level") or "info"] += 1
        kind = str(event.get("kind"))
        if kind in ("finished", "failed"):
            self._ended = event
        elif kind in ("starting", "started", "resumed_from", "stopping"):
            self._ended = None
        if kind.startswith("worker_"):
            self.worker_events = [*self.worker_events[-99:], event]


class Glance(NamedTuple):
    """What the list of runs shows of one that is not open."""

    id: str
    path: str
    status: Status
    text: str
    step: int | None
    updated: float | None
    elapsed: float | None
    planned: int | None
    latest: dict[str, Any]


def glance(folder: RunFolder, run_id: str) -> Glance:
    """A look at the ends of a run's files: no more than 200 kB are read."""
    last = newest(folder.metrics, lambda line: "marker" not in line and isinstance(line.get("step"), int)) or {}
    event = newest(folder.events, lambda line: line.get("kind") in
                   ("finished", "failed", "starting", "started", "resumed_from", "stopping"))  # fmt: skip
    ended = event if event is not None and event["kind"] in ("finished", "failed") else None
    status, text = _state(folder, ended, None)
    updated = last_written(folder)
    step, elapsed = last.get("step"), last.get("elapsed")
    return Glance(
        run_id,
        str(folder.path),
        status,
        text,
        step if isinstance(step, int) else None,
        updated,
        float(elapsed) if isinstance(elapsed, (int, float)) else None,
        _planned(folder),
        last,
    )


def _planned(folder: RunFolder) -> int | None:
    """`run.steps`, found without parsing the whole configuration: a list may hold hundreds of runs."""
    try:
        text = folder.config.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    section = re.search(r"^run:\n((?: .*\n|\n)*)", text, re.MULTILINE)
    found = re.search(r"^  steps: (\d{1,12})\s*$", section.group(1), re.MULTILINE) if section else None
    return int(found.group(1)) if found else None


def last_written(folder: RunFolder) -> float | None:
    """When any of the run's files was last written, Unix time."""
    times = []
    for path in (folder.metrics, folder.events, folder.samples):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _state(folder: RunFolder, ended: dict[str, Any] | None, now: float | None) -> tuple[Status, str]:
    if ended is not None:
        text = str(ended.get("text", ""))
        if ended.get("kind") == "failed":
            return "failed", text
        return ("stopped" if text.startswith("stopped") else "finished"), text
    if _is_written(folder.path / ".lock"):
        return "running", "a process of this machine is writing it"
    updated = last_written(folder)
    age = None if updated is None else (time.time() if now is None else now) - updated
    if age is not None and age < SILENT_AFTER:
        return "running", f"written {max(age, 0):.0f} s ago"
    return "silent", "nothing is written, and it has not ended: killed, or on another machine between two steps"


def _is_written(lock: Path) -> bool:
    """Whether a process of this machine holds the run's lock. Read from the kernel's list: trying to take the lock
    could make a starting run believe that another one holds it.
    """
    try:
        status = os.stat(lock)
        with open("/proc/locks", encoding="ascii") as file:
            wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            return any(line.split()[5] == wanted for line in file if len(line.split()) > 5)
    except (OSError, ValueError):
        return False


def _without_secrets(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: "(hidden)" if isinstance(value, str) and _SECRET.search(str(key)) else _without_secrets(value)
            for key, value in tree.items()
        }
    return [_without_secrets(item) for item in tree] if isinstance(tree, list) else tree
