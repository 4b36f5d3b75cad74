"""Inside a scorer process: loads the rewards, then runs calls as they come, one message for each result.

It imports neither torch nor ray unless a user's reward does, ignores Ctrl-C (its owner decides), and dies with the
thread that owns it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from pods_cluster.scoring.calling import CallBatch
from pods_cluster.scoring.channel import Channel
from pods_cluster.scoring.reward_registry import declared_range, describe_error, load_reward
from pods_cluster.scoring.score import FailureKind, ScoreRequest
from pods_cluster.scoring.spec import RewardConfigError, RewardSpec

# (value, kind of failure, message): one rollout's result of one reward.
Result = tuple[float | None, FailureKind | None, str]

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serves the pool at the other end of the socket until that end closes."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        specs, columns = channel.receive()
        rewards = []
        for index, spec in enumerate(specs):
            channel.send(("loading", index))
            try:
                rewards.append(load_reward(spec, index, columns))
            except RewardConfigError as error:
                return channel.send(("failed", error))
            except BaseException as error:
                problem = f"it could not be prepared: {describe_error(error)}"
                return channel.send(
                    ("failed", RewardConfigError(f"reward[{index}].name", spec.name, problem, "Fix the cause"))
                )
        channel.send(("ready", None))
        while True:
            payloads, calls = channel.receive()
            _serve(channel, specs, rewards, payloads, calls)
    except EOFError:
        pass
    finally:
        _flush()
        os._exit(0)  # not through user code's exit handlers and threads


def die_with(parent: int) -> None:
    """Ends this process when its parent ends, even inside a C loop that holds the interpreter (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _serve(
    channel: Channel,
    specs: Sequence[RewardSpec],
    rewards: Sequence[CallBatch],
    payloads: Sequence[bytes],
    calls: Sequence[tuple[int, tuple[int, ...]]],
) -> None:
    rows: dict[int, ScoreRequest] = {}
    for reward, indices in calls:
        try:
            for index in indices:
                if index not in rows:
                    rows[index] = pickle.loads(payloads[index])
            raw = rewards[reward]([rows[index] for index in indices])
            results = read_results(raw, specs[reward], len(indices))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are a reward's failures too
            results = [(None, FailureKind.ERROR, describe_error(error))] * len(indices)
        channel.send(results)


def read_results(raw: Any, spec: RewardSpec, count: int) -> list[Result]:
    """What a reward returned, as values or named failures."""
    if isinstance(raw, str | bytes) or not hasattr(raw, "__len__") or not hasattr(raw, "__iter__"):
        message = f"returned {_shown(raw)}, expected a list of {count} numbers or None"
        return [(None, FailureKind.ERROR, message)] * count
    if len(raw) != count:
        message = f"returned {len(raw)} values for {count} completions"
        return [(None, FailureKind.LENGTH, message)] * count
    ends = declared_range(spec)
    return [_read_value(value, ends) for value in raw]


def _read_value(value: Any, ends: tuple[float, float] | None) -> Result:
    if value is None:
        return None, FailureKind.NONE, "returned None"
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except Exception:
        return None, FailureKind.ERROR, f"returned {_shown(value)}, expected a number or None"
    if math.isnan(number):
        return None, FailureKind.NAN, "returned NaN"
    if math.isinf(number):
        return None, FailureKind.INFINITE, f"returned {number}"
    if ends is not None and not ends[0] - 1e-9 <= number <= ends[1] + 1e-9:
        return None, FailureKind.RANGE, f"returned {number}, outside its range [{ends[0]}, {ends[1]}]"
    return number, None, ""


def _shown(value: Any) -> str:
    try:
        return f"{repr(value)[:80]} ({type(value).__name__})"
    except Exception:
        return f"a {type(value).__name__}"
