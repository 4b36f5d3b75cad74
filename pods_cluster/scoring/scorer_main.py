"""The scorer process: loads the rewards, then runs calls as they come and answers each with one message.

It imports neither torch nor ray unless a user's reward does, ignores Ctrl-C (its owner decides), and dies with its
keeper, which dies with the thread that owns both (`scorer_keeper`). That is why its own reads need no deadline: the
owner's end closes the socket.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from pods_cluster.scoring import scorer_keeper
from pods_cluster.scoring.calling import CallBatch
from pods_cluster.scoring.channel import Channel
from pods_cluster.scoring.reward_range import into_range
from pods_cluster.scoring.reward_registry import declared_range, describe_error, load_reward
from pods_cluster.scoring.score import FailureKind, ScoreRequest
from pods_cluster.scoring.scorer_output import speaker_mark
from pods_cluster.scoring.sent_reward import SentReward

if TYPE_CHECKING:
    from pods_cluster.config import RewardConfig

Result = tuple[float | None, FailureKind | None, str]
"""One reward of one rollout: its value, or the kind and the message of its failure."""

Completion = tuple[int, str, Sequence[int] | None, Sequence[Mapping[str, Any]], float | None]
"""One rollout as it is sent: the number of its row, its text, its token ids, its turns, its environment's reward."""


def main(descriptor: int, parent: int, report: int, memory_limit: int) -> None:
    """Serves the pool at the other end of the socket until that end closes.

    `report` and `memory_limit` (bytes, 0: none) are for the keeper; see `scorer_keeper.keep`.
    """
    os.set_inheritable(descriptor, False)
    os.set_inheritable(report, False)
    if scorer_keeper.AVAILABLE:
        scorer_keeper.keep(parent, descriptor, report, memory_limit or None)
        parent = os.getppid()
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    _mark_output()
    try:
        channel.send(("pid", os.getpid()))
        rewards, columns = channel.receive()
        functions = []
        me = os.getpid()
        for index, reward in enumerate(rewards):
            channel.send(("loading", index))
            _SPEAKER.runs = index
            try:
                functions.append(load_reward(reward, index, columns))
            except BaseException as error:
                end_if_forked(me)
                from pods_cluster.config import RewardConfigError  # see SentReward

                if not isinstance(error, RewardConfigError):
                    problem = f"could not be prepared: {describe_error(error)}"
                    error = RewardConfigError(index, "name", reward.name, problem, "remove the cause")
                return channel.send(("failed", error))
            finally:
                end_if_forked(me)
                _flush()
        channel.send(("ready", None))
        rows: dict[int, bytes] = {}
        while True:
            fresh, forget, completions, calls = channel.receive()
            for number in forget:
                del rows[number]
            rows.update(fresh)
            _serve(channel, rewards, functions, rows, completions, calls)
    except EOFError:
        pass
    finally:
        _flush()
        os._exit(0)  # not through user code's exit handlers and threads


def end_if_forked(owner: int) -> None:
    """End this process if a user's call forked it and it came back here (by `return` or `sys.exit`) as another process than
    `owner`: it would answer in the owner's place, and take what is meant for it."""
    if os.getpid() != owner:
        os._exit(0)


def die_with(parent: int) -> None:
    """Ends this process when its parent ends, even inside a C loop that holds the interpreter (Linux)."""
    if scorer_keeper.AVAILABLE:
        scorer_keeper.die_with_parent(signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


class _Speaker:
    """Which reward runs, and which one the output's last mark names. A mark is written when something is printed, or a
    process is started that may print: most rewards never do."""

    runs, marked = 0, -1

    def mark(self) -> None:
        """Mark in the output that it is this reward's from here on."""
        if self.marked != self.runs:
            self.marked = self.runs
            with contextlib.suppress(OSError):
                os.write(1, speaker_mark(self.runs))

    def heard(self, event: str, _arguments: object) -> None:
        """Audit hook of the interpreter."""
        if event in _STARTS:
            self.mark()


class _Marked(io.TextIOWrapper):
    """Standard output or error, each line under its reward's mark."""

    def write(self, text: str, /) -> int:
        _SPEAKER.mark()
        return super().write(text)


_SPEAKER = _Speaker()
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})


def _mark_output() -> None:
    """Have everything that is printed from here on marked."""
    sys.stdout, sys.stderr = (
        _Marked(
            io.BufferedWriter(io.FileIO(number, "wb", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for number in (1, 2)
    )
    sys.addaudithook(_SPEAKER.heard)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _serve(
    channel: Channel,
    rewards: Sequence[SentReward],
    functions: Sequence[CallBatch],
    rows: Mapping[int, bytes],
    completions: Sequence[Completion],
    calls: Sequence[tuple[int, tuple[int, ...]]],
) -> None:
    me = os.getpid()
    requests: dict[int, ScoreRequest] = {}
    uses = Counter(index for _, indices in calls for index in indices)
    for reward, indices in calls:
        _SPEAKER.runs = reward
        try:
            for index in indices:
                if index not in requests:
                    requests[index] = _request(rows, completions[index])
            raw = functions[reward]([requests[index] for index in indices])
            results = read_results(raw, rewards[reward], len(indices))
        except MemoryError as error:
            results = [(None, FailureKind.MEMORY, describe_error(error))] * len(indices)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are a reward's failures too
            results = [(None, FailureKind.ERROR, describe_error(error))] * len(indices)
        end_if_forked(me)
        if _SPEAKER.marked == reward:  # it may have printed
            _flush()
        channel.send(results)
        for index in indices:
            uses[index] -= 1
            if not uses[index]:
                requests.pop(index, None)


def _request(rows: Mapping[int, bytes], completion: Completion) -> ScoreRequest:
    """The rollout with its row, which is unpickled for each: a reward may change what it is given."""
    number, text, token_ids, turns, environment_reward = completion
    prompt_text, answer, messages, columns = pickle.loads(rows[number])
    return ScoreRequest(prompt_text, text, answer, messages, columns, token_ids, turns, environment_reward)


def read_results(raw: Any, reward: RewardConfig | SentReward, count: int) -> list[Result]:
    """Turn what a reward returned for `count` completions into `count` values or named failures."""
    if (
        isinstance(raw, str | bytes | bytearray | Mapping | Set)
        or not hasattr(raw, "__len__")
        or not hasattr(raw, "__iter__")
    ):
        message = f"returned {_shown(raw)}, expected a list of {count} numbers or None"
        return [(None, FailureKind.ERROR, message)] * count
    if len(raw) != count:
        message = f"returned {len(raw)} values for {count} completions"
        return [(None, FailureKind.LENGTH, message)] * count
    bounds = declared_range(reward)
    results = [_read_value(value, bounds) for value in itertools.islice(raw, count + 1)]
    if len(results) != count:  # a list of its own kind may say another length than it has
        message = f"returned a {type(raw).__name__} that says {count} values and gives {len(results)}"
        return [(None, FailureKind.LENGTH, message)] * count
    return results


def _read_value(value: Any, bounds: tuple[float, float] | None) -> Result:
    if value is None:
        return None, FailureKind.NONE, "returned None"
    try:
        if isinstance(value, str | bytes | bytearray):
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
