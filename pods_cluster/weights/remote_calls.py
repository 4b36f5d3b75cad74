"""Remote calls as futures: their reply, their original error, or that they were given up on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from pods_cluster.weights.transport import first_line


def reply_to(ref: Awaitable[Any]) -> asyncio.Future[Any]:
    async def reply() -> Any:
        return await ref

    return asyncio.ensure_future(reply())


def error_of(call: asyncio.Future[Any]) -> BaseException | None:
    """The original error of a finished call: Ray wraps what a method raised."""
    error = call.exception() if call.done() and not call.cancelled() else None
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def reason_of(call: asyncio.Future[Any], seconds: float) -> str:
    """Why a call failed, '' if it did not. A call that is not done is given up on."""
    if not call.done():
        call.cancel()
        return f"did not answer within {seconds:g} s"
    error = error_of(call)
    return first_line(error) if error is not None else ""


def identity(handle: Any) -> Any:
    """Of the actor behind a handle: a replaced one keeps its name, not this."""
    return getattr(handle, "_actor_id", None) or id(handle)
