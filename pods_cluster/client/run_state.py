"""The state of a run as the files of its folder show it: whether it is written now, how far it is, how it ended."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pods_cluster.run.live_file import living_process
from pods_cluster.telemetry.line_tail import newest
from pods_cluster.telemetry.run_folder import RunFolder

Status = Literal["running", "finished", "stopped", "failed", "killed", "silent"]
SILENT_AFTER = 120.0
"""Seconds without a new line after which a run whose writer is not seen counts as silent."""
END_EVENTS = ("finished", "failed")
START_EVENTS = ("starting", "started", "resumed_from", "stopping")


class RunState(NamedTuple):
    """One run in a list of runs. `latest` is its newest step record, `planned` is `run.steps`."""

    id: str
    path: str
    status: Status
    text: str
    step: int | None
    updated: float | None
    elapsed: float | None
    planned: int | None
    latest: dict[str, Any]


def read_run_state(folder: RunFolder, run_id: str) -> RunState:
    """The state of a run from the ends of its files; no more than 200 kB are read."""
    last = newest(folder.metrics, lambda line: "marker" not in line and isinstance(line.get("step"), int)) or {}
    event = newest(folder.events, lambda line: line.get("kind") in (*END_EVENTS, *START_EVENTS))
    status, text = run_status(folder, event if event is not None and event["kind"] in END_EVENTS else None)
    step, elapsed = last.get("step"), last.get("elapsed")
    return RunState(
        run_id,
        str(folder.path),
        status,
        text,
        step if isinstance(step, int) else None,
        last_written(folder),
        float(elapsed) if isinstance(elapsed, (int, float)) else None,
        _planned_steps(folder),
        last,
    )


def run_status(folder: RunFolder, ended: dict[str, Any] | None, now: float | None = None) -> tuple[Status, str]:
    """The run's state in one word and in a sentence. `ended` is the event of its end, if its last event is one."""
    if ended is not None:
        text = str(ended.get("text", ""))
        if ended.get("kind") == "failed":
            return "failed", text
        return ("stopped" if text.startswith("stopped") else "finished"), text
    if _is_locked(folder.path / ".lock"):
        return "running", "a process of this machine is writing it"
    process = living_process(folder)
    if process is False:
        return "killed", "its process is gone, and it has not ended; continue it with --resume"
    if process:
        return "running", "a process of this machine is writing it"
    updated = last_written(folder)
    age = None if updated is None else (time.time() if now is None else now) - updated
    if age is not None and age < SILENT_AFTER:
        return "running", f"written {max(age, 0):.0f} s ago"
    return "silent", "nothing is written, and it has not ended: killed, or on another machine between two steps"


def last_written(folder: RunFolder) -> float | None:
    """When any of the run's files was last written, Unix time; None where there is no file."""
    times = []
    for path in (folder.metrics, folder.events, folder.samples):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _planned_steps(folder: RunFolder) -> int | None:
    """`run.steps`, found without parsing the whole configuration: a list may hold hundreds of runs."""
    try:
        text = folder.config.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    section = re.search(r"^run:\n((?: .*\n|\n)*)", text, re.MULTILINE)
    found = re.search(r"^  steps: (\d{1,12})\s*$", section.group(1), re.MULTILINE) if section else None
    return int(found.group(1)) if found else None


def _is_locked(lock: Path) -> bool:
    """Whether a process of this machine holds the run's lock. Read from the kernel's list: an attempt to take the lock
    could make a starting run believe that another one holds it.
    """
    try:
        status = os.stat(lock)
        with open("/proc/locks", encoding="ascii") as file:
            wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            return any(line.split()[5] == wanted for line in file if len(line.split()) > 5)
    except (OSError, ValueError):
        return False
