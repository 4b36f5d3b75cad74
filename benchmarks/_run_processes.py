"""The processes of a run: which role each has, how its memory and handles grow, and what is left of them."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

TITLES = {
    "generator": "ray::GeneratorWorker",
    "learner": "ray::LearnerRank",
    "selector": "ray::SelectorActor",
    "controller": "ray::Controller",
    "scorer": "scorer_main",
    "gcs": "gcs_server",
    "command": "pods_cluster.client.cli",
}
"""How a process of each role is recognised: by its title, or by a part of its command line."""
OTHER = "Ray"
"""The role of every other process of a run."""
SAMPLE_SECONDS = 5.0
FIRST_SECONDS, LONGEST_FIRST_SECONDS = 60.0, 240.0
"""Life of a process whose growth is not looked at, as it still takes in what it needs: half of it, within these bounds."""
SAMPLES = 6
GONE_SECONDS = 20.0


def title_of(process: psutil.Process) -> str:
    """The title that a process gave itself, or its command line; empty once it is gone."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def role_of(process: psutil.Process) -> str:
    """The role of a run's process; `OTHER` for Ray's own, and for a worker that has not yet got its actor."""
    title = title_of(process)
    return next((role for role, part in TITLES.items() if part in title), OTHER)


def lives(process: psutil.Process) -> bool:
    """Whether the process is there and not a zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass(slots=True)
class Watched:
    """A process of the run: samples are (seconds since the start, bytes resident, open handles)."""

    role: str
    process: psutil.Process
    samples: list[tuple[float, int, int]]


class ProcessWatch:
    """Every process that a run ever had. `family` returns those that it has now; `seconds` is the time since its start."""

    def __init__(self, family: Callable[[], Iterable[psutil.Process]], seconds: Callable[[], float]) -> None:
        self._family = family
        self._seconds = seconds
        self.watched: dict[int, Watched] = {}
        self.ports: set[int] = set()
        self._sampled_at = 0.0

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Processes that have this in their title or their command line, the newest last."""
        found = []
        for process in self._family():
            with suppress(psutil.Error):
                self._watch(process)
                if title in title_of(process):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found, key=lambda each: each[:2])]

    def _watch(self, process: psutil.Process) -> Watched:
        there = self.watched.get(process.pid)
        if there is None or there.process != process:
            there = self.watched[process.pid] = Watched(OTHER, process, [])
        if there.role == OTHER:  # Ray's worker gives itself the title of its actor when it gets one
            there.role = role_of(process)
        return there

    def sample_when_due(self) -> None:
        """Sample each five seconds."""
        if time.monotonic() - self._sampled_at >= SAMPLE_SECONDS:
            self.sample()

    def sample(self) -> None:
        """Note every process, its memory and handles, and the ports at which it listens."""
        self._sampled_at = time.monotonic()
        for process in self.processes():
            with suppress(psutil.Error):
                sample = (self._seconds(), process.memory_info().rss, process.num_fds())
                self._watch(process).samples.append(sample)
                self.ports |= {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}

    def growth(self) -> dict[str, dict[str, float]]:
        """By role: MiB and handles an hour by which its processes grew, median and largest, of those that lived long."""
        slopes: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for watched in self.watched.values():
            if not watched.samples:
                continue
            first, last = watched.samples[0][0], watched.samples[-1][0]
            begins = first + min(max(FIRST_SECONDS, (last - first) / 2), LONGEST_FIRST_SECONDS)
            late = [each for each in watched.samples if each[0] >= begins]
            if len(late) >= SAMPLES:
                at, size, handles = np.array(late, dtype=float).T
                hours = at / 3600
                each = (np.polyfit(hours, size / 2**20, 1)[0], np.polyfit(hours, handles, 1)[0], at[-1] - at[0])
                slopes[watched.role].append((*map(float, each), float(size[-1]) / 2**20))
        return {role: _grown(each) for role, each in sorted(slopes.items())}

    def leftovers(self) -> list[str]:
        """Titles of the processes that are still there some seconds after the run's end."""
        deadline = time.monotonic() + GONE_SECONDS
        while (left := [each.process for each in self.watched.values() if lives(each.process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.5)
        return [title_of(process) or f"process {process.pid}" for process in left]

    def ports_left(self) -> list[int]:
        """Ports at which the run listened and a process of it still does."""
        there = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr]
        ours = {pid for pid, watched in self.watched.items() if lives(watched.process)}
        return sorted(self.ports & {getattr(each.laddr, "port", 0) for each in there if each.pid in ours})


def _grown(slopes: Sequence[tuple[float, ...]]) -> dict[str, float]:
    memory, handles, seconds, sizes = zip(*slopes, strict=True)
    return {
        "processes": len(slopes),
        "longest_s": max(seconds),
        "mib_per_hour": statistics.median(memory),
        "largest_mib_per_hour": max(memory),
        "mib_at_the_end": statistics.median(sizes),
        "handles_per_hour": statistics.median(handles),
    }


def shared_memory_left(before: set[str]) -> list[str]:
    """Shared memory that is new since `before` and that no process has open or mapped: nobody will remove it."""
    new = set(os.listdir("/dev/shm")) - before
    used: set[str] = set()
    for process in psutil.process_iter() if new else ():
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            used |= {name for name in new if f"/dev/shm/{name}" in maps}
            used |= new & {Path(file.path).name for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return sorted(new - used)


def of_others(name: str, ours: set[int]) -> bool:
    """Whether shared memory has the id of a process in its name, as torch and CUDA write it, that none of `ours` had."""
    if named := re.match(r"torch_(\d+)_", name):
        return int(named[1]) not in ours
    if named := re.match(r"cuda\.shm\.\d+\.([0-9a-f]+)\.", name):
        return int(named[1], 16) not in ours
    return False
