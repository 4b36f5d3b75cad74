"""The runs in some folders: found, named, and listed by when they were last written."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pods_cluster.client.run_state import RunState, last_written, read_run_state
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError

MAX_RUNS = 2_000
STATE_SECONDS = 10.0
"""The state of a run whose files have not changed is read again after this time: it may have fallen silent."""
_ID = re.compile(r"[^A-Za-z0-9._-]+")

logger = logging.getLogger(__name__)


class RunList:
    """Runs by id: the folder's name, made unique. Safe to use from several threads."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """`paths`: folders of runs, or folders that hold such folders. Raises RunFolderError."""
        if not paths:
            raise RunFolderError("no path: give the folder of a run, or a folder of runs (run.dir)")
        self.roots: list[Path] = []
        self._single: list[Path] = []
        for path in (Path(path).expanduser().absolute() for path in paths):
            if not path.is_dir():
                raise RunFolderError(f"{path}: there is no such folder; give the folder of a run, or a folder of runs")
            (self._single if _is_run(path) else self.roots).append(path)
        self._lock = threading.RLock()
        self._folders: dict[str, RunFolder] = {}
        self._ids: dict[Path, str] = {}
        self._states: dict[str, tuple[float | None, float, RunState]] = {}
        self.find()

    def find(self) -> None:
        """Look for runs that were added or removed."""
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
                self._forget(self._ids.pop(path))

    def __len__(self) -> int:
        return len(self._folders)

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._folders)

    def states(self) -> list[RunState]:
        """The state of every run, the one last written first."""
        with self._lock:
            folders = dict(self._folders)
        now = time.monotonic()
        states = []
        for run_id, folder in folders.items():
            written = last_written(folder)
            known = self._states.get(run_id)
            if known is None or known[0] != written or now - known[1] > STATE_SECONDS:
                known = (written, now, read_run_state(folder, run_id))
                self._states[run_id] = known
            states.append(known[2])
        return sorted(states, key=lambda state: state.updated or 0.0, reverse=True)

    def _forget(self, run_id: str) -> None:
        """Called under the lock when a run's folder is gone."""
        del self._folders[run_id]
        self._states.pop(run_id, None)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()
