"""A bell on one event loop: whoever waits is woken by the next ring, or by its own deadline."""

from __future__ import annotations

import asyncio


class Bell:
    """Costs a future and a timer a wait, where `asyncio.wait_for` around an event would start a task.

    There is no state to clear: what is looked at before `wait`, without another `await` between, cannot be missed.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # woken in the order in which they came

    def ring(self) -> None:
        for future in self._waiting:
            _wake(future)
        self._waiting.clear()

    async def wait(self, seconds: float) -> None:
        """Until the next ring, or until `seconds` have passed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, future)
        self._waiting[future] = None
        try:
            await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
