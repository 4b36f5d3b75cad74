"""One run as the dashboard sees it: its history, events, samples, configuration and state."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import yaml

from pods_cluster.client.run_state import END_EVENTS, START_EVENTS, Status, run_status
from pods_cluster.dashboard.history import History
from pods_cluster.dashboard.journal import Journal, event_entry, sample_entry
from pods_cluster.telemetry.line_tail import clean, read_json
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.secret_values import without_secrets

SLICE_BYTES = 2**19
"""Read at a time, so that a request waits for some milliseconds only."""
MAX_ROWS_TOLD = 20
MAX_REWARD_FAILURES = 50
"""Steps told at once; a page that hears of more fetches its curves again."""


class Change(NamedTuple):
    """The lines that a run wrote since the last look."""

    rows: list[dict[str, float | int]]
    events: list[dict[str, Any]]
    samples: int
    reset: bool
    after: int | None = None
    """The step before the first of `rows`: a page whose curves end earlier has missed something."""

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
        """Events by level."""
        self.kinds: Counter[str] = Counter()
        """Events by kind."""
        self.worker_events: list[dict[str, Any]] = []
        self.reward_failures: dict[tuple[str, str], dict[str, Any]] = {}
        """The newest event of each reward and kind of failure."""
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
                self.kinds = Counter(entry.kind for entry in self.events.entries)
            samples = len(self.samples.advance(limit))
            steps, reset = self.history.drain()
            if len(steps) > MAX_ROWS_TOLD:
                steps, reset = steps[-1:], True
            columns = self.history.columns
            rows, before = [], None
            for step in dict.fromkeys(steps):
                row = int(columns.steps.searchsorted(step))
                if row < columns.rows and int(columns.steps[row]) == step:
                    if not rows and row:
                        before = int(columns.steps[row - 1])
                    rows.append(columns.record(row))
            return Change(rows, events[-MAX_ROWS_TOLD:], samples, reset, before)

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
                tree = clean(without_secrets(tree)) if isinstance(tree, dict) else {}
                _shorten_functions(tree)
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
            return run_status(self.folder, self._ended, now)

    def _note(self, event: dict[str, Any]) -> None:
        self.levels[event.get("level") or "info"] += 1
        kind = str(event.get("kind"))
        self.kinds[kind] += 1
        if kind in END_EVENTS:
            self._ended = event
        elif kind in START_EVENTS:
            self._ended = None
        if kind == "reward_failed":
            key = (str(event.get("reward")), str(event.get("failure")))
            if key in self.reward_failures or len(self.reward_failures) < MAX_REWARD_FAILURES:
                self.reward_failures[key] = event
        if kind.startswith("worker_"):
            self.worker_events = [*self.worker_events[-99:], event]


def _shorten_functions(tree: dict[str, Any]) -> None:
    """Put words in place of pickled reward functions: thousands of letters that nobody reads."""
    rewards = tree.get("reward")
    for reward in rewards if isinstance(rewards, list) else ():
        if isinstance(reward, dict) and reward.get("code"):
            reward["code"] = "a pickled function"
