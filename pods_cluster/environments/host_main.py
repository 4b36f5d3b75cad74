"""The environment host: a process that imports the environment once, and forks one process for each rollout.

So a rollout's environment starts in milliseconds, shares what was imported, and may hang, die or eat memory without harm to
any other. The host runs no code of users after the import. It ends with its keeper, which ends with its owner
(`scorer_keeper`), and kills whatever an environment has left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, cast

from pods_cluster.config import EnvironmentConfig
from pods_cluster.environments.environment import Environment, as_messages
from pods_cluster.scoring import scorer_keeper
from pods_cluster.scoring.calling import awaited
from pods_cluster.scoring.channel import Channel
from pods_cluster.scoring.pickled_function import unpickle_function
from pods_cluster.scoring.reward_registry import describe_error, load_object
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_main import die_with, end_if_forked
from pods_cluster.scoring.scorer_output import speaker_mark

TICK_SECONDS = 0.1
"""Time between two looks at the memory of the environments."""
MESSAGE_BYTES = 1 << 12
"""Longest command: it names a rollout."""

_PR_SET_CHILD_SUBREAPER = 36


def main(events: int, commands: int, parent: int, report: int, speaker: int) -> None:
    """Serves the owner: `events` is the socket of what happens here, `commands` the one of what to begin and to end.

    `report` is for the keeper (`scorer_keeper.keep`); `speaker` the name, by its number, under which the output is kept.
    """
    for descriptor in (events, commands, report):
        os.set_inheritable(descriptor, False)
    if scorer_keeper.AVAILABLE:
        scorer_keeper.keep(parent, events, report, None)
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(1, speaker_mark(speaker))
    channel = Channel(socket.socket(fileno=events))
    try:
        config: EnvironmentConfig = channel.receive()
        me = os.getpid()
        try:
            made = _load(config)
            end_if_forked(me)
        except BaseException as error:  # user code at import may raise anything, SystemExit included
            end_if_forked(me)
            return channel.send(("failed", describe_error(error)))
        channel.send(("ready", None))
        _Host(config, made, channel, socket.socket(fileno=commands)).serve()
    except EOFError:
        pass
    finally:
        os._exit(0)


def _load(config: EnvironmentConfig) -> Factory:
    found: Any = load_object(config.name) if config.code is None else unpickle_function(config.code)
    if problem := _trial(found, config):
        raise TypeError(problem)
    return cast(Factory, found)


def _trial(found: Any, config: EnvironmentConfig) -> str:
    """Make one environment in a process of its own, so that what it starts is not in those that are forked later.

    Options that it does not take would fail for every rollout. Returns the problem; empty where there is none.
    """
    reads, writes = os.pipe()
    if os.fork() == 0:
        problem = f"{config.name} is no class that derives from pods_cluster.environments.Environment"
        try:
            if callable(found) and isinstance(found(**config.options), Environment):
                problem = ""
        except BaseException as error:
            problem = describe_error(error)
        finally:
            os.write(writes, problem.encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        text = told.read().decode()
    os.wait()
    return text


Factory = Callable[..., Environment]


class _Host:
    """Forks and ends the environments' processes. `channel` tells the owner how each ended."""

    def __init__(self, config: EnvironmentConfig, made: Factory, channel: Channel, commands: socket.socket) -> None:
        self._config, self._made, self._channel, self._commands = config, made, channel, commands
        self._limit = None if config.memory_limit is None else round(config.memory_limit * 2**30)
        self._running: dict[int, int] = {}  # process id: number of the rollout
        self._excess: dict[int, int] = {}

    def serve(self) -> None:
        next_look = time.monotonic()
        while True:
            if select.select([self._commands], [], [], TICK_SECONDS)[0]:
                self._obey()
            self._reap()
            if (now := time.monotonic()) >= next_look:
                self._sweep()
                self._look()
                # looking at hundreds of processes must not take a core
                next_look = now + max(TICK_SECONDS, 20 * (time.monotonic() - now))

    def _obey(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._commands, MESSAGE_BYTES, 1)
        command, _, number = data.decode().partition(" ")
        if command == "begin":
            self._begin(int(number), descriptors[0])
        elif command == "end":
            for pid in [pid for pid, mine in self._running.items() if mine == int(number)]:
                _kill_family(pid)

    def _begin(self, number: int, descriptor: int) -> None:
        pid = os.fork()
        if pid:
            self._running[pid] = number
            os.close(descriptor)
            return
        try:
            self._channel.close()
            self._commands.close()
            _become_environment(self._made, self._config, descriptor)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if (number := self._running.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._channel.send(("ended", (number, code, self._excess.pop(pid, None))))

    def _sweep(self) -> None:
        """Kill what environments that have ended left behind; it is this process's child then."""
        if scorer_keeper.AVAILABLE:
            for pid in set(scorer_keeper.children(os.getpid())) - self._running.keys():
                _kill_family(pid)

    def _look(self) -> None:
        if self._limit is None or not scorer_keeper.AVAILABLE:
            return
        for pid in list(self._running):
            held = scorer_keeper.bytes_held(pid, self._limit)
            if held > self._limit:
                self._excess[pid] = held
                _kill_family(pid)


def _kill_family(pid: int) -> None:
    for each in (*scorer_keeper.descendants(pid), pid):
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)


def _become_environment(made: Factory, config: EnvironmentConfig, descriptor: int) -> NoReturn:
    """Serve one rollout: calls come as (method, argument), and each is answered with ("value", …) or ("error", kind, text)."""
    if scorer_keeper.AVAILABLE:
        scorer_keeper.die_with_parent(signal.SIGKILL)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    channel = Channel(socket.socket(fileno=descriptor))
    environment: Environment | None = None
    me = os.getpid()
    make = partial(made, **config.options)
    try:
        channel.send(("value", None))
        while True:
            method, argument = channel.receive()
            try:
                if environment is None:
                    environment = make()
                answer = ("value", _call(environment, method, argument, make))
            except MemoryError as error:
                answer = ("error", FailureKind.MEMORY, describe_error(error))
            except BaseException as error:  # SystemExit and KeyboardInterrupt are an environment's failures too
                answer = ("error", FailureKind.ERROR, describe_error(error))
            end_if_forked(me)
            channel.send(answer)
            if method == "close":
                break
    except EOFError:
        pass
    os._exit(0)  # not through user code's exit handlers and threads


def _call(environment: Environment, method: str, argument: Any, made: Factory) -> Any:
    if method == "describe":
        return {
            "role": environment.role,
            "tools": [_schema(tool) for tool in environment.tools()],
            "prompts": type(environment).first_prompt is not Environment.first_prompt,
        }
    if method == "first_prompt":
        found = awaited(made().first_prompt(argument))
        return found if isinstance(found, str) else as_messages(found, "user") or None
    if method == "reset":
        awaited(environment.reset(argument))
        return None
    if method == "step":
        return as_messages(awaited(environment.step(argument)), environment.role)
    if method == "reward":
        return _number(awaited(environment.reward()))
    awaited(environment.close())
    return None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError(f"reward() returned {value!r}, expected a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"reward() returned {number}, which is no finite number")
    return number


def _schema(tool: Any) -> Any:
    """The JSON schema of a tool, in the form that chat templates read."""
    if isinstance(tool, Mapping):
        return dict(tool)
    from transformers.utils.chat_template_utils import (
        get_json_schema,
    )  # imports for seconds, and only a run's start needs it

    return get_json_schema(tool)
