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

from pods_cluster.config import RewardConfig, RewardConfigError, ScoringConfig
from pods_cluster.scoring import scorer_keeper
from pods_cluster.scoring.channel import Channel
from pods_cluster.scoring.rows import Row, SentRows
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_main import Completion, Result
from pods_cluster.scoring.scorer_output import ScorerOutput
from pods_cluster.scoring.sent_reward import SentReward

# A plain interpreter, not multiprocessing: that would import the parent's main module (in a Ray worker: ray) again.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[5]); "
    "from pods_cluster.scoring.scorer_main import main; main(*map(int, sys.argv[1:5]))"
)

Call = tuple[int, tuple[int, ...]]
"""One call of one reward function: index of the reward, indices of the rows that it scores."""

SEND_SECONDS = 30.0
"""Deadline for handing calls to an idle process: it reads at once, unless the machine is stopped."""
REAP_SECONDS = 10.0
"""Longest wait for the end of a killed process."""
READ_SECONDS = 1.0
"""Longest wait for the rest of what a killed process printed."""


class ScorerStartError(RuntimeError):
    """A scorer process could not be started, with the cause."""


class ScorerLost(Exception):
    """The process is gone in the middle of a call: it hung and was killed, or it died."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class ScorerProcess:
    """Owns at most one live process at a time. Only its owner thread calls it, except `close`, which any thread may.

    On Linux the child of this process is the scorer's keeper, see `scorer_keeper`: whatever a reward started ends with
    the scorer. What rewards print goes to `output`.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        columns: Collection[str] | None,
        scoring: ScoringConfig,
        output: ScorerOutput,
    ) -> None:
        self._rewards = list(rewards)
        self._columns = columns
        self._scoring = scoring
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._report = -1
        self._reader: threading.Thread | None = None
        self._sent = SentRows()
        self._lock = threading.Lock()
        self._closed = False
        self.pid: int | None = None
        """Process id of the live scorer, if there is one."""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return (
            self._process is not None
            and self._process.poll() is None
            and self._channel is not None
            and not self._channel.ended
        )

    def start(self) -> None:
        """Start a process and wait until every reward is loaded. Raises RewardConfigError or ScorerStartError."""
        self.kill()
        channel = self._spawn()
        limit = self._scoring.load_timeout
        deadline = time.monotonic() + limit
        loading = 0
        try:
            channel.send(([SentReward.of(reward) for reward in self._rewards], self._columns), limit)
            while True:
                what, value = channel.receive(max(0.0, deadline - time.monotonic()))
                if what == "ready":
                    return
                if what == "failed":
                    self.kill()
                    raise value
                if what == "pid":
                    self.pid = value
                else:
                    loading = value
        except TimeoutError:
            self.kill()
            problem = f"was not loaded within {limit:g} s (scoring.load_timeout)"
            raise self._start_error(loading, problem, "raise scoring.load_timeout, or load less") from None
        except EOFError:
            kind, end = self._how_it_ended()
            self.kill()
            fix = "lower what it loads, or raise scoring.memory_limit" if kind is FailureKind.MEMORY else "mend it"
            problem = f"ended its process while it was loaded: {end}"
            raise self._start_error(loading, problem, fix) from None

    def run(
        self, rows: Sequence[Row], completions: Sequence[Completion], calls: Sequence[Call]
    ) -> Iterator[list[Result]]:
        """Run `calls` in order and yield the results of each.

        `rows` are those of the `completions`. Raises ScorerLost when the process hangs or dies: that concerns the first
        call that was not yielded.
        """
        channel = self._channel
        assert channel is not None, "start() comes first"
        try:
            channel.send((*self._sent.send(rows), completions, calls), SEND_SECONDS)
        except (EOFError, TimeoutError):
            raise self._lost() from None
        for reward, _ in calls:
            timeout_s = self._rewards[reward].timeout
            try:
                results = channel.receive(timeout_s)
            except TimeoutError:
                if not self.alive:
                    raise self._lost() from None
                self.kill()
                text = f"no result within {timeout_s:g} s (reward.{reward}.timeout); its process was killed"
                raise ScorerLost(FailureKind.TIMEOUT, text) from None
            except EOFError:
                raise self._lost() from None
            yield results

    def kill(self) -> None:
        """Kill the process and all that it started, and reap it."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)
            if self._channel is not None:
                self._channel.close()
            if self._report >= 0:
                os.close(self._report)
            if self._reader is not None:
                self._reader.join(READ_SECONDS)
            self._process = self._channel = self._reader = self.pid = None
            self._report = -1

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if scorer_keeper.AVAILABLE:
            process.terminate()
            try:
                process.wait(scorer_keeper.END_SECONDS + 1.0)
                return
            except subprocess.TimeoutExpired:  # the keeper is stopped, or something below it is stuck in the kernel
                pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: waiting gains nothing
            process.wait(REAP_SECONDS)

    def close(self) -> None:
        """Kill the process and refuse another start."""
        self._closed = True
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                # the owner thread sees the end and reaps
                if scorer_keeper.AVAILABLE:
                    self._process.terminate()
                else:
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _spawn(self) -> Channel:
        ours, theirs = socket.socketpair()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        printed, prints = os.pipe()
        report, reports = os.pipe()
        limit = self._scoring.memory_limit
        numbers = (theirs.fileno(), os.getpid(), reports, round(limit * 2**30) if limit is not None else 0)
        try:
            with self._lock:
                if self._closed:
                    raise ScorerStartError("the scorer pool is closed")
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *map(str, numbers), path],
                    stdin=subprocess.DEVNULL,
                    stdout=prints,
                    stderr=prints,
                    pass_fds=(theirs.fileno(), reports),
                    start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
                )
                self._channel, self._report, self._sent = Channel(ours), report, SentRows()
                self._reader = self._output.follow(printed)
                return self._channel
        except BaseException as error:
            ours.close()
            os.close(printed)
            os.close(report)
            if isinstance(error, OSError):
                raise ScorerStartError(f"no scorer process could be started: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(prints)
            os.close(reports)

    def _lost(self) -> ScorerLost:
        kind, end = self._how_it_ended()
        self.kill()
        return ScorerLost(kind, end)

    def _how_it_ended(self) -> tuple[FailureKind, str]:
        """The end of the process, as a kind of failure and in words, such as its exit code."""
        process = self._process
        if process is None:
            return FailureKind.DIED, "its process was killed"
        try:
            code = process.wait(scorer_keeper.END_SECONDS)
        except subprocess.TimeoutExpired:
            return FailureKind.DIED, "its process closed its connection"
        if scorer_keeper.AVAILABLE and code == 0:
            found = json.loads(os.read(self._report, 4096) or "{}")
            if found.get("memory") is not None:
                held, limit = found["memory"] / 2**30, self._scoring.memory_limit
                return FailureKind.MEMORY, (
                    f"its process held {held:.3g} GiB, more than scoring.memory_limit: {limit:g}, and was killed"
                )
            if found.get("status") is not None:
                code = os.waitstatus_to_exitcode(found["status"])
        if code >= 0:
            return FailureKind.DIED, f"its process ended with exit code {code}"
        try:
            return FailureKind.DIED, f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return FailureKind.DIED, f"its process was ended by signal {-code}"

    def _start_error(self, index: int, problem: str, fix: str) -> RewardConfigError:
        printed = self._output.tail()
        said = f" (the last that was printed: {printed})" if printed else " (nothing was printed)"
        return RewardConfigError(index, "name", self._rewards[index].name, problem + said, fix)
