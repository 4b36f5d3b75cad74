"""Live scaling: carries out what `scaling` decides, while the run goes on.

Starting, draining and looking for room happen in tasks of their own. What changes who serves or who trains happens in
the run's loop, between two steps: `at_boundary` (newcomers get the weights and serve, drained workers end) and
`rebuild_learners` (the generators have work then).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from pods_cluster.config import Config
from pods_cluster.generation.messages import Failure, GeneratorError, WorkerPhase
from pods_cluster.generation.placement import NoRoom
from pods_cluster.learning.rank_actors import LearnerError, ResizeError
from pods_cluster.run.stages import Generators, Learners, Publisher
from pods_cluster.sizing.moves import (
    Pools,
    ScaleError,
    Sizes,
    check_request,
    describe,
    moves,
    rebuild_due,
)

PATIENCE = 5.0
"""Seconds without room after which a request is said to wait."""


class Notice(Protocol):
    """Tells people that something happened."""

    def __call__(self, kind: str, text: str, *, level: Any = "info") -> None: ...


class Scaler:
    """Sizes of a run's pools, as they are and as they were asked for.

    `lose` gives back the prompts of a worker that had to end before its rollouts were taken. `hint` tells the cluster
    what the run wants to have (None: no more than it has).
    """

    def __init__(
        self,
        config: Config,
        *,
        pool: Generators,
        learners: Learners,
        publisher: Publisher,
        notice: Notice,
        lose: Callable[[Failure], Awaitable[object]],
        hint: Callable[[Sizes | None], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self.pool, self.learners, self.publisher = pool, learners, publisher
        self.target = Sizes(config.generator.workers, config.learner.workers)
        self.waiting_since: float | None = None
        self._notice, self._lose, self._hint = notice, lose, hint
        self._starts: dict[asyncio.Task[str], None] = {}
        self._ready: list[str] = []
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._room: asyncio.Task[None] | None = None
        self._room_for: int | None = None
        self._asides: set[asyncio.Task[Any]] = set()
        self._deadline = 0.0
        self._short: list[str] = []

    # Asked for from outside.

    def request(self, generators: int | None, learners: int | None) -> str:
        """Take new sizes (None: as asked for before), in place of those that wait; what the run does, in a sentence.

        Raises ScaleError. Call it in the run's event loop.
        """
        check_request(self.config, generators, learners)
        there = self.now()
        self.target = Sizes(generators or self.target.generators, learners or self.target.learners)
        self._deadline = time.monotonic() + self.config.cluster.scale_timeout
        self._short = []
        text = describe(self.target, there)
        self._notice("scaling", text)
        self._carry_out()
        if self.pending:
            self._aside(self._tell_if_it_waits(self.target))
            if self._hint is not None:
                self._aside(self._hint(self.target))
        return text

    @property
    def pending(self) -> bool:
        """Whether a change is under way."""
        there = self.now()
        return bool(self.target != Sizes(there.serving, there.learners) or self._starts or self._ready or self._drains)

    @property
    def note(self) -> str | None:
        """What a person should know of a change that is under way."""
        if not self.pending:
            return None
        phases = Counter(worker.phase for worker in self.pool.states().values())
        shown = (WorkerPhase.WAITING, WorkerPhase.STARTING, WorkerPhase.READY, WorkerPhase.LEAVING)
        parts = [f"{phases[phase]} generator(s) {phase}" for phase in shown if phases[phase]]
        if self.target.learners != self.learners.workers:
            room = self._room is None or self._room.done()
            parts.append(
                f"learner group goes to {self.target.learners} rank(s)"
                + (" after this step" if room else " when there is room")
            )
        left = self._deadline - time.monotonic()
        if left > 0 and any("room" in part for part in parts):
            parts.append(f"given up in {left:.0f} s")
        return ", ".join(parts) or None

    def now(self) -> Pools:
        """The pools as they are."""
        return Pools(
            len(self.pool.serving), len(self._starts) + len(self._ready), self.learners.workers, self._room_for
        )

    def values(self) -> dict[str, float]:
        """Metrics of the pools' sizes."""
        there = self.now()
        return {
            "generator/workers": float(there.serving),
            "generator/starting": float(there.coming),
            "generator/leaving": float(len(self._drains)),
            "generator/target": float(self.target.generators),
            "learner/workers": float(there.learners),
            "learner/target": float(self.target.learners),
        }

    def wants_replacement(self, failure: Failure) -> bool:
        """Whether another worker is to take the place of one that is gone: not of one that was leaving.

        The run waits for it, so it is also wanted where nobody is left to serve before a newcomer does.
        """
        there = self.now()
        short = there.serving + there.coming < self.target.generators
        return there.serving == 0 or (short and not failure.leaving)

    # In the run's loop, between two steps.

    async def at_boundary(self, version: int) -> None:
        """Newcomers take the weights of `version` and serve; workers that are drained, or late, end."""
        await self._admit(version)
        for name, drain in list(self._drains.items()):
            if not drain.done():
                continue
            del self._drains[name]
            failure = await self.pool.dismiss(name)
            left = len(failure.groups) if failure is not None else 0
            if failure is not None and left:
                await self._lose(failure)
            self._notice("generator_left", f"{name} has left"
                         + (f"; {left} group(s) that it had not finished go to others" if left else ""))  # fmt: skip
        self._carry_out()
        self._settle()

    @property
    def rebuild_is_due(self) -> bool:
        """Whether the learner group is to have another size and there is room for it."""
        room = self._room is not None and self._room.done() and not self._room.cancelled()
        return rebuild_due(self.target, self.now(), room)

    async def rebuild_learners(self, folder: Path) -> None:
        """Give the learner group the size asked for; call it when `rebuild_is_due`.

        The state travels through `folder`. Raises LearnerError when no group works afterwards.
        """
        before, wanted, began = self.learners.workers, self.target.learners, time.monotonic()
        self._room, self._room_for = None, None
        await self.publisher.close()
        try:
            await self.learners.resize(wanted, folder)
        except ResizeError as error:
            self.target = Sizes(self.target.generators, self.learners.workers)
            self._notice("scale_failed", str(error), level="warning")
        else:
            seconds = time.monotonic() - began
            self._notice("learners_rebuilt", f"the learner group has {wanted} rank(s) in place of {before}, its weights "
                         f"and optimiser state are the same; it took {seconds:.1f} s")  # fmt: skip
        await self.publisher.follow(self.learners.handles)
        self._settle()

    async def close(self) -> None:
        """End what is under way; the pools themselves are closed by their owner."""
        tasks = [*self._starts, *self._drains.values(), *self._asides, *([self._room] if self._room else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._hint is not None and self.waiting_since is not None:
            with contextlib.suppress(Exception):
                await self._hint(None)

    # Within.

    async def _admit(self, version: int) -> None:
        ready, self._ready = self._ready, []
        if not ready:
            return
        report = await self.publisher.publish(version, {name: self.pool.prepared_worker(name) for name in ready})
        for name in ready:
            if name in report.failed:
                self.pool.withdraw(name)
                self._fewer(f"{name} did not take version {version}: {report.failed[name]}")
            else:
                self.pool.admit(name)
                self._notice("generator_joined", f"{name} serves version {version}")

    def _carry_out(self) -> None:
        do = moves(self.target, self.now())
        left = self._deadline - time.monotonic()
        for _ in range(do.start):
            task = asyncio.ensure_future(self.pool.prepare(max(left, 0.1)))
            self._starts[task] = None
            task.add_done_callback(self._started)
        for _ in range(do.withdraw):
            if self._starts:
                task = next(reversed(self._starts))
                del self._starts[task]
                task.cancel()
            else:
                self.pool.withdraw(self._ready.pop())
        if do.retire:
            for name in self.pool.retire(do.retire):
                drain = self.pool.drain(name, self.config.cluster.drain_timeout)
                self._drains[name] = asyncio.ensure_future(drain)
        if do.release or do.reserve is not None:
            self._drop_room()
        if do.reserve is not None:
            self._room_for = do.reserve
            self._room = asyncio.ensure_future(self.learners.reserve(do.reserve, max(left, 0.1)))
            self._room.add_done_callback(self._found_room)

    def _started(self, task: asyncio.Task[str]) -> None:
        if task not in self._starts:
            if not task.cancelled() and task.exception() is None:
                self.pool.withdraw(task.result())  # it came up in the moment in which it was called off
            return
        del self._starts[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, NoRoom):
            self.target = Sizes(max(self.target.generators - 1, 1), self.target.learners)
            self._short.append(str(error))
        elif error is not None:
            self._fewer(str(error) if isinstance(error, GeneratorError) else f"{type(error).__name__}: {error}")
        elif not task.cancelled():
            self._ready.append(task.result())
        if self._short and not self._starts:  # told of together: their deadline was one
            short, self._short = self._short, []
            more = f" and {len(short) - 1} more: " if len(short) > 1 else ": "
            name, _, reason = short[0].partition(" ")
            self._gave_up(f"{name}{more}{reason}")

    def _found_room(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task is not self._room:
            return
        error = task.exception()
        if error is None:
            return
        self._room, self._room_for = None, None
        self.target = Sizes(self.target.generators, self.learners.workers)
        cause = str(error) if isinstance(error, LearnerError) else f"{type(error).__name__}: {error}"
        self._notice("scale_failed", f"{cause}; the run goes on with {self.learners.workers} learner rank(s)",
                     level="warning")  # fmt: skip

    def _fewer(self, reason: str) -> None:
        """A newcomer did not come: the run goes on with what it has."""
        self.target = Sizes(max(self.target.generators - 1, 1), self.target.learners)
        self._gave_up(reason)

    def _gave_up(self, reason: str) -> None:
        text = f"{reason}; the run goes on with {self.target.generators} generator(s)"
        self._notice("scale_failed", text, level="warning")

    def _drop_room(self) -> None:
        room, self._room, self._room_for = self._room, None, None
        if room is not None and not room.done():
            room.cancel()
        self.learners.release()

    def _settle(self) -> None:
        if self.waiting_since is not None and not self.pending:
            self.waiting_since = None
            if self._hint is not None:
                self._aside(self._hint(None))

    async def _tell_if_it_waits(self, target: Sizes) -> None:
        self.waiting_since = time.monotonic()
        await asyncio.sleep(PATIENCE)
        waiting = sum(worker.phase is WorkerPhase.WAITING for worker in self.pool.states().values())
        room = self._room is not None and not self._room.done()
        if self.target == target and (waiting or room):
            lacks = [f"{waiting} generator(s)"] if waiting else []
            lacks += [f"{self.target.learners - self.learners.workers} learner rank(s)"] if room else []
            self._notice("scale_waiting", f"no room yet for {' and '.join(lacks)}; the run goes on, the request waits "
                         f"up to {self.config.cluster.scale_timeout:g} s (cluster.scale_timeout)")  # fmt: skip

    def _aside(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)


__all__ = ["ScaleError", "Scaler", "Sizes"]
