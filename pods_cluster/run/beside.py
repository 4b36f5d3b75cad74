"""Work that ends, with work beside it that has no end of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Coroutine[Any, Any, T], *beside: Coroutine[Any, Any, Any]) -> T:
    """The result of `work`, with `beside` running meanwhile; the first of them that raises ends the others."""
    tasks = [asyncio.ensure_future(work), *(asyncio.ensure_future(coroutine) for coroutine in beside)]
    try:
        pending = set(tasks)
        while not tasks[0].done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
