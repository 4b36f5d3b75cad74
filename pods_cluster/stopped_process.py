"""Whether a process that does not answer is lost with its node, is stopped, or hangs: the first two are known in seconds, the
third by its silence alone.

A process is stopped by SIGSTOP (a person, a scheduler that suspends a job) until SIGCONT comes. One that computes, waits for
a disk or holds Python's lock is not, and neither is one under a debugger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from pods_cluster.node_reach import reaches

SILENT_SECONDS = 3.0
"""Silence after which a process is looked at."""
UNREACHED_SECONDS = 5.0
"""A node that no look within such a time could reach is lost: a network that drops some packets, or all for a moment, is not."""
APART_SECONDS = 1.0
"""Time between two looks: what is stopped at both is not just being continued, as after Ctrl-Z and `fg`."""
LISTEN_SECONDS = 1.0
"""Time between two moments at which an answer is listened for."""
LAPSE_SECONDS = 5.0
"""Most that one such moment adds to a silence: after a longer one this process was stopped itself, and an answer may be on its
way."""
TASK_SECONDS = 20.0
"""Deadline of a look on another node, where a process may have to start for it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a Ray node."""

    pid: int
    node: str


class Unanswered(Exception):
    """No answer came for `seconds`: the process is `stopped`, its node is not reached (`cut_off`), or it hangs."""

    def __init__(self, seconds: float, *, stopped: bool = False, cut_off: bool = False) -> None:
        self.seconds, self.stopped, self.cut_off = seconds, stopped, cut_off
        state = "its node cannot be reached" if cut_off else f"its process {'is stopped' if stopped else 'hangs'}"
        super().__init__(f"did not answer for {seconds:.0f} s: {state}")

    @property
    def seen(self) -> bool:
        """Whether a look has told why, so that no longer silence is needed."""
        return self.stopped or self.cut_off


class Silence:
    """How long nothing was heard of a process, as far as this one listened."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._listened = time.monotonic()
        self._unreached_since: float | None = None
        self._look: asyncio.Future[bool] | None = None

    def end(self) -> None:
        """The process answered, or is not asked any more."""
        self.seconds, self._listened, self._unreached_since = 0.0, time.monotonic(), None
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def goes_on(self) -> None:
        """It has not, up to now."""
        now = time.monotonic()
        self.seconds += min(now - self._listened, LAPSE_SECONDS)
        self._listened = now

    async def check(self, process: Process | None, patience: float) -> None:
        """Raise Unanswered for a process (None: not known) that is stopped or whose node is lost, or that was silent for more
        than `patience` seconds. It takes some seconds where one of these is near."""
        stopped = False
        if self.seconds >= SILENT_SECONDS and process is not None:
            began = time.monotonic()
            if await reaches(process.node):
                self._unreached_since = None
                stopped = await self._seen_stopped(process)
            else:
                self._unreached_since = self._unreached_since or began
                if time.monotonic() - self._unreached_since >= UNREACHED_SECONDS:
                    raise Unanswered(self.seconds, cut_off=True)
        self._judge(stopped, patience)

    async def _seen_stopped(self, process: Process) -> bool:
        """Whether a look has found the process stopped; one on another node may take longer than a call of this."""
        if self._look is None:
            self._look = asyncio.ensure_future(stays_stopped(process))
        await asyncio.wait({self._look}, timeout=APART_SECONDS + LISTEN_SECONDS)
        if not self._look.done():
            return False
        look, self._look = self._look, None
        return look.result()

    def check_here(self, pid: int | None, patience: float) -> None:
        """The same for a process of this machine, in a thread that may wait for APART_SECONDS."""
        stopped = self.seconds >= SILENT_SECONDS and pid is not None and stays_stopped_here(pid)
        self._judge(stopped, patience)

    def _judge(self, stopped: bool, patience: float) -> None:
        if stopped or self.seconds > patience:
            raise Unanswered(self.seconds, stopped=stopped)


async def answer_of(call: Awaitable[T], process: Process | None, patience: float, *, lasts: float = 0.0) -> T:
    """Answer of a process to a call that may last so many seconds; what the call raises is raised.

    Raises Unanswered after `patience` seconds more, and sooner where the process is stopped or its node is lost.
    """
    answer = asyncio.ensure_future(call)
    silence = Silence()
    try:
        while not (await asyncio.wait({answer}, timeout=_listen_for(silence.seconds, lasts, patience)))[0]:
            silence.goes_on()
            if silence.seconds >= lasts + min(SILENT_SECONDS, patience):
                try:
                    await silence.check(process, lasts + patience)
                except Unanswered:
                    if not answer.done():
                        raise
        return answer.result()
    finally:
        silence.end()
        answer.cancel()


def _listen_for(silent: float, lasts: float, patience: float) -> float:
    """Seconds to the next moment at which something may be found."""
    next_moment = lasts + min(SILENT_SECONDS, patience) - silent
    return max(min(next_moment, LAPSE_SECONDS), 0.05) if next_moment > 0 else LISTEN_SECONDS


def is_stopped(pid: int) -> bool:
    """Whether this process of this machine is stopped now; False where that cannot be known."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def stays_stopped_here(pid: int) -> bool:
    """Whether this process of this machine is stopped, and still is a second later; False where that cannot be known."""
    if not is_stopped(pid):
        return False
    time.sleep(APART_SECONDS)
    return is_stopped(pid)


async def stays_stopped(process: Process) -> bool:
    """The same for a process of any Ray node."""
    import ray

    if process.node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(stays_stopped_here, process.pid)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(_look_there(process).future()), TASK_SECONDS)
    except Exception:  # the node is gone, or has no room for a process: then silence has to tell
        return False


def _look_there(process: Process) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    return (
        ray.remote(stays_stopped_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(process.pid)
    )
