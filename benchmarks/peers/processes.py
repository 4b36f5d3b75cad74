"""A command as a process of its own, ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

KILL_SECONDS = 15.0
LOOK_SECONDS = 0.5
ERROR_LETTERS = 1500


class Child:
    """A command under way, its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as file:
            # A session of its own: Ctrl-C reaches this process alone, which then ends them in order.
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )
        self._started: dict[int, psutil.Process] = {}

    def runs(self) -> bool:
        """Whether it has not ended. Notes what it has started: once it is dead, its children cannot be found any more."""
        if self._process.poll() is not None:
            return False
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._started |= {child.pid: child for child in below}
        return True

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def ask(self, to_end: signal.Signals) -> None:
        """Send the signal and wait a while, so that it can put away what is its own (shared memory, say)."""
        if self.runs():
            self._process.send_signal(to_end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)

    def kill(self) -> None:
        """End it and everything that it started, and wait until all of it is gone: it may hold a card's memory."""
        self.runs()
        self._started |= {process.pid: process for process in psutil.process_iter() if self._in_group(process)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_SECONDS)
        left = [child for child in self._started.values() if child.is_running()]  # a pid used again does not count
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(left, KILL_SECONDS)

    def _in_group(self, process: psutil.Process) -> bool:
        """Whether it is of the command's process group, to which also those belong whose parent died before a look."""
        with contextlib.suppress(OSError):
            return process.pid != self._process.pid and os.getpgid(process.pid) == self._process.pid
        return False

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace").strip()[-ERROR_LETTERS:]


def run_command(
    command: Sequence[str],
    log: Path,
    deadline: float,
    environment: Mapping[str, str] | None = None,
    server: Child | None = None,
) -> str | None:
    """Run it with its output in `log`. None, or what went wrong: its exit status and last lines, or the deadline.

    Where it needs a `server`, it is ended as soon as that one has ended: the cause is then the server's. Whatever the
    command started is ended with it, also when this process is interrupted.
    """
    child = Child(command, log, environment)
    until = time.monotonic() + deadline
    try:
        while True:
            running = child.runs()
            if not running and child.exit_status == 0:
                return None
            if server is not None and not server.runs():
                return (
                    f"the server ended before the arm, with exit status {server.exit_status}; "
                    f"its output ends with: {server.last_lines()}"
                )
            late = running and time.monotonic() > until
            if late:
                child.ask(signal.SIGTERM)  # not SIGINT, which a command behind nohup never gets
            if late or not running:
                cause = f"not done after {deadline:.0f} s" if late else f"exit status {child.exit_status}"
                if server is not None:
                    cause += f" (the server runs; its output ends with: {server.last_lines()})"
                return f"{cause}; its output ends with: {child.last_lines()}"
            time.sleep(LOOK_SECONDS)
    finally:
        child.kill()
