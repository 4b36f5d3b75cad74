"""Watch over the free places of the engines: each worker is asked once, and answers when it has room."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pods_cluster.generation.placement import ANSWER_SECONDS, answer_or_none

PAUSE_SECONDS = 0.25
"""Pause after answers that brought nothing: a worker that failed answers at once until the pool's check finds it."""


TOGETHER_SECONDS = 0.01
"""Answers that come within it after the first count together."""


class RoomWatch:
    """The calls to workers that are out. One that has not answered is asked no second time."""

    def __init__(self) -> None:
        self._calls: dict[str, asyncio.Task[int | None]] = {}

    async def wait(self, workers: Mapping[str, Any], places: int, timeout: float) -> dict[str, int]:
        """Wait until engines have fewer than `places` rollouts, at most `timeout` seconds.

        Returns how many rollouts each engine has that answered now: what came before the call is old news.
        """
        for name in [name for name, call in self._calls.items() if call.done() or name not in workers]:
            self._calls.pop(name).cancel()
        for name, handle in workers.items():
            if name not in self._calls:
                call = answer_or_none(handle.wait_for_room.remote(places, timeout), timeout + ANSWER_SECONDS)
                self._calls[name] = asyncio.ensure_future(call)
        if self._calls:
            _, waiting = await asyncio.wait(self._calls.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if waiting:  # those who have room too are not to get less for an answer some milliseconds later
                await asyncio.wait(waiting, timeout=TOGETHER_SECONDS)
        answered = {name: self._calls.pop(name).result() for name in [n for n, c in self._calls.items() if c.done()]}
        found = {name: count for name, count in answered.items() if count is not None}
        if not found and (answered or not workers):
            await asyncio.sleep(min(timeout, PAUSE_SECONDS))
        return found

    def close(self) -> None:
        """Wait for no answer any more."""
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()
