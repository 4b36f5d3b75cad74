"""Continuous issue: with `staleness` above 0, groups are issued as the engines have room, beside all else that a run does.

A group that is issued while the engines serve version V is trained at version V + k at the latest, as long as no more
than (k + 1) x P groups are out, those in training among them: that is the ledger's bound. Between the update and the
moment when all engines serve its weights that count would start a version too early, so nothing is issued then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from pods_cluster.config import Config
from pods_cluster.run.stages import Generators

ROOM_SECONDS = 1.0
"""Deadline of one question whether an engine has room."""
PAUSE_SECONDS = 0.02
"""Pause where there was room and nothing to issue."""


class ContinuousIssue:
    """Decides when groups are issued, and how many: as many as fill the free places of the engines.

    `free` says how many slots the ledger has, `issue` sends so many more groups under a version; `lock` is held
    meanwhile. With staleness 0 it issues nothing by itself: all groups of a step are issued at its start.
    """

    def __init__(
        self,
        config: Config,
        pool: Generators,
        *,
        free: Callable[[], int],
        issue: Callable[[int, int], Awaitable[int]],
        group_size: Callable[[], int],
        lock: asyncio.Lock,
    ) -> None:
        self.on = config.staleness > 0
        self._config, self._pool = config.generator, pool
        self._free, self._issue, self._group_size, self._lock = free, issue, group_size, lock
        self._version: int | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def serve(self, version: int) -> None:
        """All engines serve `version`: groups may be issued under it."""
        self._version = version
        self._changed.set()

    def hold(self) -> None:
        """Issue nothing until `serve`: the learner's version has changed, or an evaluation comes."""
        self._version = None

    def end(self) -> None:
        """Issue nothing any more."""
        self._ended = True

    def look(self) -> None:
        """Slots may have come free."""
        self._changed.set()

    async def run(self) -> None:
        """Issue groups as there is room for them, without end. Raises what issuing raises."""
        while True:
            while not self._possible():
                self._changed.clear()
                await self._changed.wait()
            room = await self._pool.wait_for_room(self.places_per_worker(), ROOM_SECONDS)
            if room <= 0:
                continue
            issued = 0
            async with self._lock:
                if (count := self._possible()) and self._version is not None:
                    issued = await self._issue(min(count, math.ceil(room / self._group_size())), self._version)
            if not issued:  # held meanwhile, or a prompt is being tried alone
                await asyncio.sleep(PAUSE_SECONDS)

    def places_per_worker(self) -> int:
        """Rollouts that one worker is to have in its engine, waiting ones included (`generator.in_flight`)."""
        return self._config.places_per_worker(len(self._pool.serving))

    def _possible(self) -> int:
        return 0 if self._version is None or self._ended else self._free()
