"""`live.json` in a run's folder: the address of the Ray cluster on which the run is alive. No ray."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from pods_cluster.telemetry.run_folder import RunFolder

LIVE_FILE = "live.json"


def write_live_file(folder: RunFolder, address: str) -> None:
    """Write the cluster's address and this process's id, so that `pods scale RUN` finds the run by its folder."""
    values = {"address": address, "pid": os.getpid()}
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
