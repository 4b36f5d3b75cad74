"""Where a live run can be reached: a file in its folder that is there as long as the run is. No ray."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from pods_cluster.telemetry.run_folder import RunFolder

LIVE_FILE = "live.json"


def announce(folder: RunFolder, address: str) -> None:
    """Write where the run's Ray cluster is, so that `pods scale RUN` finds it without being told."""
    place = {"address": address, "pid": os.getpid()}
    with contextlib.suppress(OSError):  # a folder that cannot be written is told of by what must be written
        (folder.path / LIVE_FILE).write_text(json.dumps(place) + "\n", encoding="utf-8")


def withdraw(folder: RunFolder) -> None:
    """The run is not alive any more."""
    with contextlib.suppress(OSError):
        (folder.path / LIVE_FILE).unlink(missing_ok=True)


def place_of(folder: RunFolder) -> dict[str, Any] | None:
    """What `announce` wrote; None where the run has ended (one that was killed may still say that it is alive)."""
    try:
        place = json.loads((folder.path / LIVE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return place if isinstance(place, dict) and isinstance(place.get("address"), str) else None
