"""Memory that this process can still take: what its machine has free, or less where its container or job has a limit.

The limits are those of Linux control groups (Docker, Kubernetes, Slurm, systemd), which `/proc/meminfo` does not show; a
process that goes past one is killed. Limits of all groups above this one hold too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 gives a number near 2^63 where there is no limit."""


def free_memory() -> int:
    """Bytes that can be allocated on this machine now, by this process and all others of its control groups together."""
    return max(0, min(int(psutil.virtual_memory().available), *limits(GROUPS, OWN), NO_LIMIT))


def limits(groups: Path, own: Path) -> list[int]:
    """Bytes that are left under each limit of this process's control groups. Cached files do not count as used."""
    found = []
    for folder, (limit, used, cached) in _memory_groups(groups, own):
        try:
            most = int((folder / limit).read_text())
            if most < NO_LIMIT:
                found.append(most - int((folder / used).read_text()) + _stat(folder / "memory.stat", cached))
        except (OSError, ValueError):  # no such group in this namespace, or "max"
            continue
    return found


def _memory_groups(groups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the process's memory groups up to the topmost, with the names of limit, use and cached files in them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = top / path.strip("/")
        for folder in (inner, *inner.parents):
            yield folder, names
            if folder == top:
                break


def _stat(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
