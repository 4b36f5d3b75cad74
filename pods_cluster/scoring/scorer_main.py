"""The scorer process: loads the rewards, then runs calls as they come and answers each with one message.

It imports neither torch nor ray unless a user's reward does, ignores Ctrl-C (its owner decides), and dies with the
thread that owns it. That is why its own reads need no deadline: the owner's end closes the socket, and the kernel ends
this process with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from pods_cluster.config import RewardConfig, RewardConfigError
from pods_cluster.scoring.calling import CallBatch
from pods_cluster.scoring.reward_range import into_range
from pods_cluster.scoring.reward_registry import declared_range, describe_error, load_reward
from pods_cluster.scoring.score import FailureKind, ScoreRequest

Result = tuple[float | None, FailureKind | None, str]
"""One reward of one rollout: its value, or the kind and the message of its failure."""

_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("!Q")


class Channel:
    """Pickled messages over one end of a socket, with a deadline in seconds on each call (None: no deadline).

    Raises EOFError when the other end is closed, TimeoutError when the deadline has passed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Pickle a message and send all of it."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError("the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for one whole message and return it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_HEADER.size, deadline)
        size = _HEADER.unpack_from(self._buffer)[0]
        self._fill(_HEADER.size + size, deadline)
        message = pickle.loads(bytes(self._buffer[_HEADER.size : _HEADER.size + size]))
        del self._buffer[: _HEADER.size + size]
        return message

    def close(self) -> None:
        """Close this end; the other end sees EOFError."""
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        # Large reads: all small results that have piled up arrive with one wake-up of the reading thread.
        while len(self._buffer) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError as error:
                raise EOFError("the other end is gone") from error
            if not data:
                raise EOFError("the other end is gone")
            self._buffer += data


def main(descriptor: int, parent: int) -> None:
    """Serves the pool at the other end of the socket until that end closes."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        rewards, columns = channel.receive()
        functions = []
        for index, reward in enumerate(rewards):
            channel.send(("loading", index))
            try:
                functions.append(load_reward(reward, index, columns))
            except RewardConfigError as error:
                return channel.send(("failed", error))
            except BaseException as error:
                problem = f"could not be prepared: {describe_error(error)}"
                return channel.send(
                    ("failed", RewardConfigError(index, "name", reward.name, problem, "remove the cause"))
                )
        channel.send(("ready", None))
        while True:
            payloads, calls = channel.receive()
            _serve(channel, rewards, functions, payloads, calls)
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
    rewards: Sequence[RewardConfig],
    functions: Sequence[CallBatch],
    payloads: Sequence[bytes],
    calls: Sequence[tuple[int, tuple[int, ...]]],
) -> None:
    rows: dict[int, ScoreRequest] = {}
    for reward, indices in calls:
        try:
            for index in indices:
                if index not in rows:
                    rows[index] = pickle.loads(payloads[index])
            raw = functions[reward]([rows[index] for index in indices])
            results = read_results(raw, rewards[reward], len(indices))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are a reward's failures too
            results = [(None, FailureKind.ERROR, describe_error(error))] * len(indices)
        channel.send(results)


def read_results(raw: Any, reward: RewardConfig, count: int) -> list[Result]:
    """Turn what a reward returned for `count` completions into `count` values or named failures."""
    if isinstance(raw, str | bytes) or not hasattr(raw, "__len__") or not hasattr(raw, "__iter__"):
        message = f"returned {_shown(raw)}, expected a list of {count} numbers or None"
        return [(None, FailureKind.ERROR, message)] * count
    if len(raw) != count:
        message = f"returned {len(raw)} values for {count} completions"
        return [(None, FailureKind.LENGTH, message)] * count
    bounds = declared_range(reward)
    return [_read_value(value, bounds) for value in raw]


def _read_value(value: Any, bounds: tuple[float, float] | None) -> Result:
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
    if bounds is None:
        return number, None, ""
    within = into_range(number, *bounds)
    if within is None:
        return None, FailureKind.RANGE, f"returned {number}, outside its range [{bounds[0]}, {bounds[1]}]"
    return within, None, ""


def _shown(value: Any) -> str:
    try:
        return f"{repr(value)[:80]} ({type(value).__name__})"
    except Exception:
        return f"a {type(value).__name__}"
