"""The keeper of a scorer process: a small process above it, so that nothing that a reward started outlives the scorer.

The keeper adopts what the scorer's processes leave behind (Linux: child subreaper), also daemons with a session of
their own. When the scorer ends, its owner ends, or the owner says so (SIGTERM), it kills all of them. It also watches
the memory that they hold together.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

AVAILABLE = sys.platform == "linux"
"""Elsewhere a scorer is its owner's child, and only its process group ends with it."""

TICK_SECONDS = 0.1
"""Time between two looks at the scorer's memory; what it starts is looked for each tenth time."""
END_SECONDS = 5.0
"""Longest time that the keeper tries to kill what is left."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this signal when the thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def keep(parent: int, channel: int, report: int, memory_limit: int | None) -> None:
    """Fork: returns in the child, which becomes the scorer; the parent stays as its keeper and never returns.

    parent: the owner's process id. channel, report: file descriptors of the scorer's messages, and of the keeper's one
    last report, a JSON object: `status` as `os.waitpid` gives it, `memory` in bytes where it was too much.
    memory_limit: bytes; None: no limit.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
    scorer = os.fork()
    if scorer == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(report)
        return
    try:
        os.close(channel)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        status, memory = _watch(scorer, memory_limit)
        os.write(report, json.dumps({"status": status, "memory": memory}).encode())
    finally:
        os._exit(0)


def _watch(scorer: int, memory_limit: int | None) -> tuple[int | None, int | None]:
    """Wait for the scorer's end or for SIGTERM, and end all that is left. Returns the scorer's status and memory."""
    status = memory = None
    ticks, next_look = 0, 0.0
    while status is None:
        found = signal.sigtimedwait(_SIGNALS, TICK_SECONDS)
        if found is not None and found.si_signo == signal.SIGTERM:
            break
        status = _reap(scorer)
        # A reward may start processes all the time, so that no wait for the next one's end is a whole tick.
        if memory_limit is not None and status is None and (now := time.monotonic()) >= next_look:
            next_look = now + TICK_SECONDS
            family = [scorer, *(descendants(os.getpid()) if ticks % 10 == 0 else ())]
            ticks += 1
            if sum(map(_own_bytes, set(family))) > memory_limit:
                # Pages that forked processes share were counted for each of them; this counts them once.
                held = sum(map(_proportional_bytes, {scorer, *descendants(os.getpid())}))
                if held > memory_limit:
                    memory = held
                    break
    _end_all()
    return status, memory


def _reap(scorer: int) -> int | None:
    """Collect every child that has ended; returns the scorer's status when it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == scorer:
            found = status


def _end_all() -> None:
    """Kill all descendants, again until none is left: they may start others meanwhile."""
    deadline = time.monotonic() + END_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        _reap(-1)


def descendants(root: int) -> list[int]:
    """Process ids of all that `root` started, directly or not, and of what it adopted."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        more = children(waiting.pop())
        found += more
        waiting += more
    return found


def children(pid: int) -> list[int]:
    """Process ids of what `pid` started itself, and of what it adopted."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except FileNotFoundError:
        if not Path("/proc/self/task", str(os.getpid()), "children").exists():  # a kernel without this file
            return [child for child in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(child) == pid]
    except OSError:
        pass
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def bytes_held(root: int, limit: int) -> int:
    """Bytes that `root` and all that it started hold; exact only where they are more than `limit`."""
    family = {root, *descendants(root)}
    held = sum(map(_own_bytes, family))
    return held if held <= limit else sum(map(_proportional_bytes, family))


def _own_bytes(pid: int) -> int:
    """Resident bytes of a process that no file on disk lies behind; what is shared with a fork is counted in both."""
    return _kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) * 1024


def _proportional_bytes(pid: int) -> int:
    """Resident bytes of a process, a page that k processes share counted as 1/k in each."""
    held = _kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
    return held * 1024 if held else _own_bytes(pid)


def _kilobytes(file: str, names: tuple[str, ...]) -> int:
    """Sum of these lines of a file such as /proc/<pid>/status; 0 where the process has ended."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
