"""`rewards.log` of a run: what its rewards printed, line by line under their names, in bounded files."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pods_cluster.scoring.scorer_output import Printed

LOG_BYTES = 8 << 20
"""Size at which the file is put aside as `rewards.1.log`, in the place of the one before it: 16 MiB in all."""


class RewardLog:
    """Appends to `path`. A line is `<time, UTC> <worker> <reward>: <text>`."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self.path = path
        self._limit = limit

    def write(self, source: str, printed: Printed) -> None:
        """Append what the scorers of `source` printed. Raises OSError."""
        lines = [
            f"{datetime.fromtimestamp(line.seconds, UTC):%Y-%m-%d %H:%M:%S} {source} {line.reward}: {line.text}\n"
            for line in printed.lines
        ]
        if printed.left_out:
            lines.insert(
                0, f"({source}: {printed.left_out:,} lines left out: they came faster than they were fetched)\n"
            )
        if not lines:
            return
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
            size = file.tell()
        if size >= self._limit:
            os.replace(self.path, self.path.with_suffix(".1.log"))
