"""Generators that start and leave while the run goes on: a task for each, taken in by the loop between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pods_cluster.generation.messages import Failure, GeneratorError, NoRoom
from pods_cluster.sizing.pools import Notice, ScalablePool, WeightPublisher
from pods_cluster.wording import counted


class GeneratorChanges:
    """The generators on their way into the pool and out of it.

    `lower_target` is called for each generator that does not come, and `give_up` with the reason, so that people are
    told. `lose` gives back the prompts of a worker that had to end before its rollouts were taken.
    """

    def __init__(
        self,
        pool: ScalablePool,
        publisher: WeightPublisher,
        notice: Notice,
        *,
        lower_target: Callable[[], None],
        give_up: Callable[[str], None],
        lose: Callable[[Failure], Awaitable[object]],
    ) -> None:
        self._pool, self._publisher, self._notice = pool, publisher, notice
        self._lower_target, self._give_up, self._lose = lower_target, give_up, lose
        # each with the worker that is gone and whose place it takes, if there is one
        self._starts: dict[asyncio.Task[str], str | None] = {}
        self._ready: dict[str, str | None] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._not_placed: list[str] = []

    @property
    def coming(self) -> int:
        """Workers that start, or have started and do not serve yet."""
        return len(self._starts) + len(self._ready)

    @property
    def leaving(self) -> int:
        """Workers that only finish what they have."""
        return len(self._drains)

    @property
    def pending(self) -> bool:
        """Whether a worker is on its way in or out."""
        return bool(self._starts or self._ready or self._drains)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that run now."""
        return [*self._starts, *self._drains.values()]

    def start(self, count: int, placement: float, in_place_of: str | None = None) -> None:
        """Begin to start `count` workers, which may wait `placement` seconds for room; `in_place_of` one that is gone."""
        for _ in range(count):
            task = asyncio.ensure_future(self._pool.prepare(placement))
            self._starts[task] = in_place_of
            task.add_done_callback(self._started)

    def withdraw(self, count: int) -> None:
        """Call `count` workers off that do not serve yet, those that started last first."""
        for _ in range(count):
            if self._starts:
                task = next(reversed(self._starts))
                del self._starts[task]
                task.cancel()
            else:
                self._pool.withdraw(self._ready.popitem()[0])

    def retire(self, count: int, timeout: float) -> None:
        """Give `count` workers no new groups any more, and wait up to `timeout` seconds for what they have."""
        for name in self._pool.retire(count) if count else []:
            self._drains[name] = asyncio.ensure_future(self._pool.drain(name, timeout))

    def retire_worker(self, name: str, timeout: float) -> None:
        """Give this worker no new groups any more, and wait up to `timeout` seconds for what it has."""
        self._pool.retire_workers([name])
        self._drains[name] = asyncio.ensure_future(self._pool.drain(name, timeout))

    def forget_failures(self) -> None:
        """Another request replaces the one that workers without room belonged to."""
        self._not_placed = []

    async def admit(self, version: int) -> None:
        """Give the workers that have started the weights of `version`; those that took them serve."""
        ready, self._ready = self._ready, {}
        if not ready:
            return
        workers = {name: self._pool.prepared_worker(name) for name in ready}
        try:
            report = await self._publisher.publish(version, workers)
        except BaseException:  # the learner's failure: they are still there, and take the weights that it sends next
            self._ready = ready | self._ready
            raise
        for name, gone in ready.items():
            if name in report.failed:
                self._pool.withdraw(name)
                self._lower_target()
                self._give_up(f"{name} did not take version {version}: {report.failed[name]}")
            else:
                self._pool.admit(name)
                if gone is None:
                    self._notice("generator_joined", f"{name} serves version {version}")
                else:
                    self._notice("worker_replaced", f"{name} serves version {version} in place of {gone}")

    async def dismiss_drained(self) -> None:
        """End the workers that are drained or whose time is up; what they had not finished goes to others."""
        for name, drain in list(self._drains.items()):
            if not drain.done():
                continue
            del self._drains[name]
            failure = await self._pool.dismiss(name)
            left = len(failure.groups) if failure is not None else 0
            if failure is not None and left:
                await self._lose(failure)
            self._notice("generator_left", f"{name} has left"
                         + (f"; others take {counted(left, 'group')} that it had not finished" if left else ""))  # fmt: skip

    def _started(self, task: asyncio.Task[str]) -> None:
        error = None if task.cancelled() else task.exception()
        if task not in self._starts:
            if not task.cancelled() and error is None:
                self._pool.withdraw(task.result())  # it came up in the moment in which it was called off
            return
        gone = self._starts.pop(task)
        if error is not None:
            self._lower_target()
        if isinstance(error, NoRoom):
            self._not_placed.append(str(error))
        elif error is not None:
            self._give_up(str(error) if isinstance(error, GeneratorError) else f"{type(error).__name__}: {error}")
        elif not task.cancelled():
            self._ready[task.result()] = gone
        if self._not_placed and not self._starts:  # told in one event: their deadline was the same
            failures, self._not_placed = self._not_placed, []
            more = f" and {len(failures) - 1} more: " if len(failures) > 1 else ": "
            name, _, reason = failures[0].partition(" ")
            self._give_up(f"{name}{more}{reason}")
