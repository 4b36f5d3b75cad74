"""The runs that the dashboard shows, and the one thread that follows those that are open."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pods_cluster.client.run_list import RunList
from pods_cluster.dashboard.run_view import Change, RunView

LOOK_SECONDS = 0.2
"""How often open runs are looked at: a line is shown within a second."""
FIND_SECONDS = 2.0
"""How often new runs are looked for."""
IDLE_SECONDS = 600.0
"""A run that nobody asked for so long is closed."""
MEMORY_BYTES = 128 * 2**20
"""Columns of open runs may take this much; the least recently asked for are closed first."""
CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class RunWatcher(RunList):
    """The runs of a `RunList`, each opened, and its files read, when it is first asked for."""

    def __init__(self, paths: Sequence[str | Path], on_change: Callable[[RunView, Change], None] | None = None) -> None:
        """`on_change` is called on the watcher's thread when an open run has written. Raises RunFolderError."""
        self.on_change = on_change
        self._open: dict[str, RunView] = {}
        self._asked = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(paths)

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

    def touch(self, run_id: str) -> None:
        """Keep the run open: a page shows it."""
        view = self._open.get(run_id)
        if view is not None:
            view.used = time.monotonic()

    def start(self) -> None:
        """Follow open runs on a thread until `close`."""
        self._thread = threading.Thread(target=self._watch, name="dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _forget(self, run_id: str) -> None:
        super()._forget(run_id)
        self._open.pop(run_id, None)

    def _advance(self, view: RunView) -> None:
        change = view.advance()
        if change and self.on_change is not None:
            self.on_change(view, change)

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
