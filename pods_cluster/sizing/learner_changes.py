"""Another size of the learner group: its room is reserved by a task, the group is rebuilt between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pods_cluster.learning.reports import LearnerError, ResizeError
from pods_cluster.sizing.pools import Notice, ResizableLearners, WeightPublisher
from pods_cluster.wording import counted


class LearnerChanges:
    """The learner group on its way to another size; `keep_size` is called when it stays at the one that it has."""

    def __init__(
        self,
        learners: ResizableLearners,
        publisher: WeightPublisher,
        notice: Notice,
        *,
        keep_size: Callable[[], None],
    ) -> None:
        self._learners, self._publisher, self._notice = learners, publisher, notice
        self._keep_size = keep_size
        self._reservation: asyncio.Task[None] | None = None
        self.reserved: int | None = None
        """The size for which room is reserved or looked for; None: neither."""
        self.rebuilding_from: int | None = None
        """The size before, while the group is rebuilt: the new ranks do not train yet. None otherwise."""

    @property
    def has_room(self) -> bool:
        """Whether there is room for the reserved size."""
        return self._reservation is not None and self._reservation.done() and not self._reservation.cancelled()

    @property
    def waits_for_room(self) -> bool:
        """Whether room is looked for."""
        return self._reservation is not None and not self._reservation.done()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that run now."""
        return [] if self._reservation is None else [self._reservation]

    def reserve(self, ranks: int, timeout: float) -> None:
        """Look for the room of a group of `ranks`, for `timeout` seconds, in place of any other."""
        self.release()
        self.reserved = ranks
        self._reservation = asyncio.ensure_future(self._learners.reserve(ranks, timeout))
        self._reservation.add_done_callback(self._reservation_ended)

    def release(self) -> None:
        """Give back the room that is reserved, or look for it no longer."""
        reservation, self._reservation, self.reserved = self._reservation, None, None
        if reservation is not None and not reservation.done():
            reservation.cancel()
        self._learners.release()

    async def rebuild(self, ranks: int, folder: Path) -> None:
        """Give the group `ranks` ranks, its state through `folder`. Raises LearnerError when no group works afterwards."""
        before, began = self._learners.workers, time.monotonic()
        self._reservation, self.reserved = None, None
        self.rebuilding_from = before
        try:
            await self._publisher.close()
            await self._resize(ranks, before, began, folder)
            await self._publisher.use_ranks(self._learners.handles)
        finally:
            self.rebuilding_from = None

    async def _resize(self, ranks: int, before: int, began: float, folder: Path) -> None:
        try:
            await self._learners.resize(ranks, folder)
        except ResizeError as error:
            self._keep_size()
            self._notice("scale_failed", str(error), level="warning")
        else:
            seconds = time.monotonic() - began
            self._notice("learners_rebuilt", f"the learner group has {counted(ranks, 'rank')} in place of {before}, its weights "
                         f"and optimiser state are the same; it took {seconds:.1f} s")  # fmt: skip

    def _reservation_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task is not self._reservation:
            return
        error = task.exception()
        if error is None:
            return
        self._reservation, self.reserved = None, None
        self._keep_size()
        cause = str(error) if isinstance(error, LearnerError) else f"{type(error).__name__}: {error}"
        self._notice("scale_failed", f"{cause}; the run goes on with {counted(self._learners.workers, 'learner rank')}",
                     level="warning")  # fmt: skip
