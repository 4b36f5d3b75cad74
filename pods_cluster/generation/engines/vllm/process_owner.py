"""Ends the processes of a vLLM engine with the worker that started them.

A worker that is killed (out of memory, `kill -9`, a replaced one that hung) cannot end its engine's core, and vLLM's core
waits for requests for ever: the card's memory stays taken, and the replacement cannot start. So the worker leaves its name in
the environment that its engine's processes inherit, and each process that holds a model looks whether it still lives.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_OWNER = "PODS_ENGINE_OWNER"
_EVERY = 1.0
"""Seconds between two looks."""


@contextmanager
def owning(process: bool) -> Iterator[None]:
    """Makes this process the owner of the engine processes that start in here; nothing where none does (`process`)."""
    if not process:
        yield
        return
    os.environ[_OWNER] = f"{os.getpid()} {psutil.Process().create_time()}"
    try:
        yield
    finally:
        os.environ.pop(_OWNER, None)  # what else this process starts does not end with it


def end_with_owner() -> None:
    """Watch the owner of this engine process from now on. Does nothing in the owner itself, or where none is named."""
    pid, _, born = os.environ.get(_OWNER, "").partition(" ")
    if born and int(pid) != os.getpid():
        threading.Thread(target=_watch, args=(int(pid), float(born)), name="engine-owner", daemon=True).start()


def _watch(pid: int, born: float) -> None:
    core = os.getppid()
    while _lives(pid, born):
        time.sleep(_EVERY)
    # A tensor-parallel worker is a child of the core, which holds no model and does not watch by itself.
    if core != pid and os.getppid() == core:
        with suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os._exit(1)


def _lives(pid: int, born: float) -> bool:
    """Whether the process `pid` that was created at `born` lives. Numbers are used again; a zombie does not count."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
