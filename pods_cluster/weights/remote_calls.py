"""Remote calls as futures: their result, their original error, or that they were abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from pods_cluster.weights.transport import first_line


def start_call(ref: Awaitable[Any]) -> asyncio.Future[Any]:
    """Future of a remote call's reply."""

    async def reply() -> Any:
        return await ref

    return asyncio.ensure_future(reply())


def shared_argument(value: Any) -> Any:
    """`value` as an argument of many remote calls: written once into Ray's object store, of which each call carries the
    reference. The list of a 70B model's tensors takes 5 ms of the caller to write, which it did for every generator."""
    import ray

    return ray.put(value) if ray.is_initialized() else value


def original_error(call: asyncio.Future[Any]) -> BaseException | None:
    """Error that the method of a finished call raised (Ray wraps it); None if there is none."""
    error = call.exception() if call.done() and not call.cancelled() else None
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def failure_reason(call: asyncio.Future[Any], seconds: float) -> str:
    """Why a call failed, "" if it did not. A call that is not done after `seconds` is abandoned."""
    if not call.done():
        call.cancel()
        return f"did not answer within {seconds:g} s"
    error = original_error(call)
    return first_line(error) if error is not None else ""


def actor_identity(handle: Any) -> Any:
    """Identity of the actor behind a handle, which tells a worker from its replacement of the same name."""
    return getattr(handle, "_actor_id", None) or id(handle)
