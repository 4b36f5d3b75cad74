"""Processes that a killed run leaves of its own Ray cluster: found and ended when the next one starts on this machine. No ray.

Ray's processes end with the one that started them, but for some when that is killed by SIGKILL: agents, and workers that
are stopped or hang. Every one of them writes to the logs of its session's folder; that is how they are told from others.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pods_cluster.run.live_file import process_began, this_machine

END_SECONDS = 5.0
"""Time that the processes have to be gone after SIGKILL."""


def note_session(session: Path) -> Path:
    """Note that this process has started the Ray session of this folder; returns the note. Raises OSError."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    note = folder / f"{os.getpid()}-{session.name}.json"
    values = {
        "session": str(session),
        "pid": os.getpid(),
        "began": process_began(os.getpid()),
        "machine": this_machine(),
    }
    note.write_text(json.dumps(values) + "\n", encoding="utf-8")
    return note


def forget_session(note: Path) -> None:
    """The session has ended with its processes."""
    with suppress(OSError):
        note.unlink()


def end_leftovers() -> int:
    """End what is left of sessions of this user whose process is gone; how many processes that were."""
    ended = 0
    for note, values in _notes():
        if values.get("machine") != this_machine():
            continue
        if process_began(values["pid"]) == values["began"]:
            continue  # its process lives
        processes = list(_processes_of(Path(values["session"])))
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=END_SECONDS)
        ended += len(processes)
        forget_session(note)
    return ended


def _notes() -> Iterator[tuple[Path, dict[str, Any]]]:
    for note in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(note.read_text(encoding="utf-8"))
            if isinstance(values, dict) and isinstance(values.get("pid"), int) and values.get("session"):
                yield note, values


def _processes_of(session: Path) -> Iterator[psutil.Process]:
    """Processes of this user that have a file of the session's folder open."""
    inside = f"{session}{os.sep}"
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and any(
                file.path.startswith(inside) for file in process.open_files()
            ):
                yield process


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"pods-cluster-{os.getuid()}" / "sessions"
