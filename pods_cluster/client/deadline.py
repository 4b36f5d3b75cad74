"""Calls that may hang, made on a thread that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


def on_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """Start `call` on a daemon thread: unlike a pool's thread, one that hangs does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits for it any more
                future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                future.set_result(value)

    threading.Thread(target=run, name="call with a deadline", daemon=True).start()
    return future


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or what it raises. Raises TimeoutError after `seconds`; the call itself goes on."""
    future = on_daemon_thread(call)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # it was the call that raised it
            raise
        raise TimeoutError(f"no answer in {seconds:g} s") from None


async def awaited_within(seconds: float, call: Callable[[], T]) -> T:
    """`call_within` for a coroutine: the event loop goes on meanwhile."""
    return await asyncio.wait_for(asyncio.wrap_future(on_daemon_thread(call)), seconds)
