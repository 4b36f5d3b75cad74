"""The runs under the given paths, and the one thread that reads them on."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pods_cluster.dashboard.run_view import Change, Glance, RunView, glance, last_written
from pods_cluster.telemetry.run_folder import RunFolder

LOOK_SECONDS = 0.2
"""How often open runs are looked at: a line is told within a second."""
FIND_SECONDS = 2.0
"""How often new runs are looked for."""
IDLE_SECONDS = 600.0
"""A run that nobody asked for so long is closed."""
MEMORY_BYTES = 128 * 2**20
"""Columns of open runs may take this much; the least recently asked for are closed first."""
MAX_RUNS = 2_000
_ID = re.compile(r"[^A-Za-z0-9._-]+")

logger = logging.getLogger(__name__)


class DashboardError(Exception):
    """The dashboard cannot be started as asked; the text says why and what to do."""


class Runs:
    """Runs by id (the folder's name, made unique). A run is opened, and its files read, when it is asked for."""

    def __init__(self, paths: Sequence[str | Path], on_change: Callable[[RunView, Change], None] | None = None) -> None:
        """`paths`: run folders, or folders of run folders. Raises DashboardError."""
        if not paths:
            raise DashboardError("no path: give the folder of a run, or a folder of runs (run.dir)")
        self.roots: list[Path] = []
        self._single: list[Path] = []
        for path in (Path(path).expanduser().absolute() for path in paths):
            if not path.is_dir():
                raise DashboardError(f"{path}: there is no such folder; give the folder of a run, or a folder of runs")
            (self._single if _is_run(path) else self.roots).append(path)
        self.on_change = on_change
        self._lock = threading.RLock()
        self._folders: dict[str, RunFolder] = {}
        self._ids: dict[Path, str] = {}
        self._open: dict[str, RunView] = {}
        self._glances: dict[str, tuple[float | None, float, Glance]] = {}
        self._asked = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.find()

    def find(self) -> None:
        """Look for runs that came or went."""
        found = list(self._single)
        for root in self.roots:
            try:
                found += sorted(path for path in root.iterdir() if _is_run(path))
            except OSError as error:
                logger.warning("%s: cannot be listed (%s)", root, error.strerror)
        with self._lock:
            for path in found[:MAX_RUNS]:
                if path not in self._ids:
                    name = _ID.sub("-", path.name).strip("-.")[:120] or "run"
                    number, run_id = 1, name
                    while run_id in self._folders:
                        number += 1
                        run_id = f"{name}~{number}"
                    self._ids[path] = run_id
                    self._folders[run_id] = RunFolder(path)
            for path in set(self._ids) - set(found):
                run_id = self._ids.pop(path)
                del self._folders[run_id]
                self._open.pop(run_id, None)
                self._glances.pop(run_id, None)

    def __len__(self) -> int:
        return len(self._folders)

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._folders)

    def get(self, run_id: str) -> RunView:
        """The run, opened if it was not. Raises KeyError."""
        self._asked = time.monotonic()
        with self._lock:
            view = self._open.get(run_id)
            if view is None:
                view = RunView(self._folders[run_id], run_id)
                self._open[run_id] = view
                self._make_room(view)
            else:
                view.used = time.monotonic()
                return view
        self._advance(view)  # a short run is there at once
        return view

    def _advance(self, view: RunView) -> None:
        change = view.advance()
        if change and self.on_change is not None:
            self.on_change(view, change)

    def touch(self, run_id: str) -> None:
        """The run is being watched: keep it open."""
        view = self._open.get(run_id)
        if view is not None:
            view.used = time.monotonic()

    def list(self) -> list[Glance]:
        """All runs, the one last written first."""
        with self._lock:
            folders = dict(self._folders)
        now = time.monotonic()
        glances = []
        for run_id, folder in folders.items():
            written = last_written(folder)
            known = self._glances.get(run_id)
            if known is None or known[0] != written or now - known[1] > 10:
                known = (written, now, glance(folder, run_id))
                self._glances[run_id] = known
            glances.append(known[2])
        return sorted(glances, key=lambda found: found.updated or 0.0, reverse=True)

    def start(self) -> None:
        """Follow open runs on a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._watch, name="dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _watch(self) -> None:
        found_at = time.monotonic()
        while not self._stop.is_set():
            busy = False
            with self._lock:
                views = list(self._open.values())
            for view in views:
                try:
                    self._advance(view)
                    busy = busy or view.loading
                except Exception:  # one broken folder must not end the watching of the others
                    logger.exception("run %s cannot be followed now", view.id)
            if time.monotonic() - found_at > FIND_SECONDS:
                self.find()
                self._close_idle()
                found_at = time.monotonic()
            # while a long file is read, requests come first: the pauses let their threads run
            asked = time.monotonic() - self._asked < 1.0
            self._stop.wait((0.03 if asked else 0.001) if busy else LOOK_SECONDS)

    def _close_idle(self) -> None:
        now = time.monotonic()
        with self._lock:
            for run_id, view in list(self._open.items()):
                if now - view.used > IDLE_SECONDS:
                    del self._open[run_id]
            self._make_room(None)

    def _make_room(self, keep: RunView | None) -> None:
        views = sorted(self._open.values(), key=lambda view: view.used)
        total = sum(view.nbytes for view in views)
        for view in views:
            if total <= MEMORY_BYTES or len(self._open) <= 1:
                break
            if view is not keep:
                total -= view.nbytes
                self._open.pop(view.id, None)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()
