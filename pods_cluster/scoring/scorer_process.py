"""One scorer process as its owner thread handles it: start, calls with deadlines, kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from pods_cluster.config import RewardConfig, RewardConfigError
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_main import Channel, Result

# A plain interpreter, not multiprocessing: that would import the parent's main module (in a Ray worker: ray) again.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from pods_cluster.scoring.scorer_main import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

Call = tuple[int, tuple[int, ...]]
"""One call of one reward function: index of the reward, indices of the rows that it scores."""

SEND_SECONDS = 30.0
"""Deadline for handing calls to an idle process: it reads at once, unless the machine is stopped."""
REAP_SECONDS = 10.0
"""Longest wait for the end of a killed process."""


class ScorerStartError(RuntimeError):
    """A scorer process could not be started, with the cause."""


class ScorerLost(Exception):
    """The process is gone in the middle of a call: it hung and was killed, or it died."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class ScorerProcess:
    """Owns at most one live process at a time. Only its owner thread calls it, except `close`, which any thread may."""

    def __init__(
        self, rewards: Sequence[RewardConfig], columns: Collection[str] | None, start_timeout_s: float
    ) -> None:
        self._rewards = list(rewards)
        self._columns = columns
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the live process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start a process and wait until every reward is loaded. Raises RewardConfigError or ScorerStartError."""
        self.kill()
        channel = self._spawn()
        deadline = time.monotonic() + self._start_timeout_s
        loading = 0
        try:
            channel.send((self._rewards, self._columns), self._start_timeout_s)
            while True:
                what, value = channel.receive(max(0.0, deadline - time.monotonic()))
                if what == "ready":
                    return
                if what == "failed":
                    self.kill()
                    raise value
                loading = value
        except TimeoutError:
            self.kill()
            raise self._start_error(loading, f"was not loaded within {self._start_timeout_s:g} s") from None
        except EOFError:
            end = self._how_it_ended()
            self.kill()
            raise self._start_error(loading, f"ended its process while it was loaded: {end}") from None

    def run(self, payloads: Sequence[bytes], calls: Sequence[Call]) -> Iterator[list[Result]]:
        """Run `calls` in order and yield the results of each.

        `payloads` are pickled requests, one a row. Raises ScorerLost when the process hangs or dies: that concerns the
        first call that was not yielded.
        """
        channel = self._channel
        assert channel is not None, "start() comes first"
        try:
            channel.send((payloads, calls), SEND_SECONDS)
        except (EOFError, TimeoutError):
            end = self._how_it_ended()
            self.kill()
            raise ScorerLost(FailureKind.DIED, end) from None
        for reward, _ in calls:
            timeout_s = self._rewards[reward].timeout
            try:
                results = channel.receive(timeout_s)
            except TimeoutError:
                gone = not self.alive
                end = self._how_it_ended() if gone else f"no result within {timeout_s:g} s; its process was killed"
                self.kill()
                raise ScorerLost(FailureKind.DIED if gone else FailureKind.TIMEOUT, end) from None
            except EOFError:
                end = self._how_it_ended()
                self.kill()
                raise ScorerLost(FailureKind.DIED, end) from None
            yield results

    def kill(self) -> None:
        """Kill the process and all that it started (its process group), and reap it."""
        with self._lock:
            if self._process is not None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: waiting gains nothing
                    self._process.wait(REAP_SECONDS)
            if self._channel is not None:
                self._channel.close()
            self._process = self._channel = None

    def close(self) -> None:
        """Kill the process and refuse another start."""
        self._closed = True
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # the owner thread sees the end and reaps

    def _spawn(self) -> Channel:
        ours, theirs = socket.socketpair()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        try:
            with self._lock:
                if self._closed:
                    raise ScorerStartError("the scorer pool is closed")
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), path],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what user code prints must not mix into our own output
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
                )
                self._channel = Channel(ours)
                return self._channel
        except OSError as error:
            ours.close()
            raise ScorerStartError(f"no scorer process could be started: {error}") from error
        finally:
            theirs.close()

    def _how_it_ended(self) -> str:
        """The end of the process in words, such as its exit code."""
        process = self._process
        if process is None:
            return "its process was killed"
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "its process closed its connection"
        if code >= 0:
            return f"its process ended with exit code {code}"
        try:
            return f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was ended by signal {-code}"

    def _start_error(self, index: int, problem: str) -> RewardConfigError:
        return RewardConfigError(index, "name", self._rewards[index].name, problem, "see the scorer's output above")
