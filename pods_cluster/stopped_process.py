"""Whether a process that does not answer is stopped: known in seconds, where its silence alone could mean a long pass.

A process is stopped by SIGSTOP (a person, a scheduler that suspends a job) until SIGCONT comes. One that computes, waits for
a disk or holds Python's lock is not, and neither is one under a debugger.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

SILENT_SECONDS = 3.0
"""Silence after which a process is looked at."""
APART_SECONDS = 1.0
"""Time between two looks: what is stopped at both is not just being continued, as after Ctrl-Z and `fg`."""
TASK_SECONDS = 20.0
"""Deadline of a look on another node, where a process may have to start for it."""


def is_stopped(pid: int) -> bool:
    """Whether this process of this machine is stopped now; False where that cannot be known."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


async def stays_stopped(pid: int, node: str) -> bool:
    """Whether a process of this Ray node is stopped, and still is a second later; False where that cannot be known."""
    import ray

    if node == ray.get_runtime_context().get_node_id():
        if not is_stopped(pid):
            return False
        await asyncio.sleep(APART_SECONDS)
        return is_stopped(pid)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(_look_there(pid, node).future()), TASK_SECONDS)
    except Exception:  # the node is gone, or has no room for a process: then silence has to tell
        return False


def _look_there(pid: int, node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_looks).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


def _looks(pid: int) -> bool:
    if not is_stopped(pid):
        return False
    time.sleep(APART_SECONDS)
    return is_stopped(pid)
