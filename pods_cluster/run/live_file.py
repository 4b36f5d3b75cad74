"""`live.json` in a run's folder: the Ray cluster on which the run is alive, and the process that writes it. No ray."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from pods_cluster.telemetry.run_folder import RunFolder

LIVE_FILE = "live.json"


def write_live_file(folder: RunFolder, address: str) -> None:
    """Write the cluster's address and which process this is, so that `pods scale RUN` finds the run by its folder, and
    `pods status RUN` knows a killed one.
    """
    values = {"address": address, "pid": os.getpid(), "began": process_began(os.getpid()), "machine": this_machine()}
    with contextlib.suppress(OSError):  # the recorder reports a folder that cannot be written
        (folder.path / LIVE_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def remove_live_file(folder: RunFolder) -> None:
    """Remove the file when the run ends."""
    with contextlib.suppress(OSError):
        (folder.path / LIVE_FILE).unlink(missing_ok=True)


def read_live_file(folder: RunFolder) -> dict[str, Any] | None:
    """The file's values, `address` among them; None where the run has ended. A killed run leaves its file behind."""
    try:
        values = json.loads((folder.path / LIVE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("address"), str) else None


def living_process(folder: RunFolder) -> int | bool | None:
    """The id of the process that writes the run, where it is on this machine; False where it is gone without having
    ended the run; None where that cannot be known: the run has ended, or is on another machine.
    """
    values = read_live_file(folder)
    if values is None or not isinstance(values.get("pid"), int) or values.get("machine") != this_machine():
        return None
    began = process_began(values["pid"])
    if began is None or began != values.get("began"):
        return False  # or another process has its id by now
    return values["pid"]


def this_machine() -> list[str] | None:
    """The host's name and the namespace of its process ids: ids mean the same where both are equal."""
    try:
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def process_began(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where there is none, or it is dead and not collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]
