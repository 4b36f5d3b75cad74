"""Live scaling: brings the pools to the sizes that were asked for, while the run goes on.

What takes long happens in tasks: starting and draining generators (`generator_changes`), finding room for learner ranks
(`learner_changes`). What changes who serves or who trains happens in the run's loop, between two steps: `at_boundary`
(new generators get the weights and serve, drained ones end) and `rebuild_learners` (the generators have work then).
`moves` decides what to do next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from pods_cluster.config import Config
from pods_cluster.generation.messages import Failure, WorkerPhase
from pods_cluster.sizing.generator_changes import GeneratorChanges
from pods_cluster.sizing.learner_changes import LearnerChanges
from pods_cluster.sizing.moves import Pools, ScaleError, Sizes, check_request, describe, moves, rebuild_due
from pods_cluster.sizing.pools import Notice, ResizableLearners, ScalablePool, WeightPublisher
from pods_cluster.wording import counted

NODE_SECONDS = 2.0
"""Time between two questions whether nodes are about to go; of a notice little may be left after it (30 s on Kubernetes)."""
WAIT_NOTICE_SECONDS = 5.0
"""Time without room after which an event says that a request waits."""


class Scaler:
    """The sizes of a run's pools, as they are and as they were asked for (`target`).

    `lose` gives back the prompts of a worker that had to end before its rollouts were taken. `hint` tells the cluster
    which sizes the run wants (None: no more than it has).
    """

    def __init__(
        self,
        config: Config,
        *,
        pool: ScalablePool,
        learners: ResizableLearners,
        publisher: WeightPublisher,
        notice: Notice,
        lose: Callable[[Failure], Awaitable[object]],
        hint: Callable[[Sizes | None], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self.pool, self.learners = pool, learners
        self.target = Sizes(config.generator.workers, config.learner.workers)
        self._notice, self._hint = notice, hint
        self._generators = GeneratorChanges(
            pool, publisher, notice, lower_target=self._lower_target, give_up=self._give_up, lose=lose
        )
        self._learners = LearnerChanges(learners, publisher, notice, keep_size=self._keep_ranks)
        self._waiting = False
        self._deadline = 0.0
        self._going: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    # Asked for from outside.

    def request(self, generators: int | None, learners: int | None) -> str:
        """Take new sizes (None: as asked for before) in place of those that wait; what the run does, in a sentence.

        Raises ScaleError. Call it in the run's event loop.
        """
        check_request(self.config, generators, learners)
        pools = self.now()
        self.target = Sizes(generators or self.target.generators, learners or self.target.learners)
        self._deadline = time.monotonic() + self.config.cluster.scale_timeout
        self._generators.forget_failures()
        text = describe(self.target, pools)
        self._notice("scaling", text)
        self._apply_moves()
        if self.pending:
            self._wait()
        return text

    @property
    def pending(self) -> bool:
        """Whether a change is under way."""
        pools = self.now()
        sizes = Sizes(pools.serving, pools.learners)
        return self.target != sizes or self._generators.pending or self._learners.rebuilding_from is not None

    @property
    def training_ranks(self) -> int:
        """Learner ranks that train: while the group is rebuilt, those that it had before."""
        before = self._learners.rebuilding_from
        return self.learners.workers if before is None else before

    @property
    def note(self) -> str | None:
        """A sentence about the change that is under way; None without one."""
        if not self.pending:
            return None
        phases = Counter(worker.phase for worker in self.pool.states().values())
        shown = (WorkerPhase.WAITING, WorkerPhase.STARTING, WorkerPhase.READY, WorkerPhase.LEAVING)
        parts = [f"{counted(phases[phase], 'generator')} {phase}" for phase in shown if phases[phase]]
        if self._learners.rebuilding_from is not None:
            parts.append(
                f"learner group is rebuilt with {counted(self.learners.workers, 'rank')} in place of {self.training_ranks}"
            )
        if self.target.learners != self.learners.workers:
            parts.append(
                f"learner group goes to {counted(self.target.learners, 'rank')}"
                + (" when there is room" if self._learners.waits_for_room else " after this step")
            )
        left = self._deadline - time.monotonic()
        if left > 0 and any("room" in part for part in parts):
            parts.append(f"given up in {left:.0f} s")
        return ", ".join(parts) or None

    def now(self) -> Pools:
        """The pools as they are; a generator that serves only until another one takes its place counts no more."""
        serving = self.pool.serving
        going = len(self._going.intersection(serving)) if time.monotonic() < self._deadline else 0
        return Pools(len(serving) - going, self._generators.coming, self.learners.workers, self._learners.reserved)

    def values(self) -> dict[str, float]:
        """Metrics of the pools' sizes."""
        pools = self.now()
        return {
            "generator/workers": float(len(self.pool.serving)),
            "generator/starting": float(pools.coming),
            "generator/leaving": float(self._generators.leaving),
            "generator/target": float(self.target.generators),
            "learner/workers": float(pools.learners),
            "learner/target": float(self.target.learners),
        }

    def wants_replacement(self, failure: Failure) -> bool:
        """Whether another worker is to take the place of one that is gone: not of one that was leaving.

        The run waits for it where nobody is left to serve before a new worker does, so it is wanted then in any case.
        """
        pools = self.now()
        short = pools.serving + pools.coming < self.target.generators
        return not self.pool.serving or (short and not failure.leaving)

    def start_another(self, failure: Failure) -> None:
        """Start a worker in place of one that is gone, while the others go on; it serves from a step's boundary on.

        Where it finds no room within `cluster.placement_timeout`, or does not start, the pool stays smaller.
        """
        self._generators.start(1, self.config.cluster.placement_timeout, in_place_of=failure.worker)

    def give_up_room(self) -> None:
        """Room that is reserved for learner ranks is given back, or looked for no longer: the group starts again."""
        self._learners.release()

    def look_for_ranks(self) -> None:
        """The learner group was started again, maybe with fewer ranks than are asked for: room for the others is looked for
        as after a request, in `cluster.scale_timeout`."""
        if self.learners.workers < self.target.learners:
            self._deadline = time.monotonic() + self.config.cluster.scale_timeout
            self._wait()

    # In the run's loop, between two steps.

    async def at_boundary(self, version: int) -> None:
        """New generators take the weights of `version` and serve; those that are drained, or late, end."""
        await self._generators.admit(version)
        await self._generators.dismiss_drained()
        self._apply_moves()
        self._end_waiting()

    @property
    def rebuild_is_due(self) -> bool:
        """Whether the learner group is to have another size and there is room for it."""
        return rebuild_due(self.target, self.now(), self._learners.has_room)

    async def rebuild_learners(self, folder: Path) -> None:
        """Give the learner group the size asked for; call it when `rebuild_is_due`.

        The state travels through `folder`. Raises LearnerError when no group works afterwards.
        """
        await self._learners.rebuild(self.target.learners, folder)
        self._end_waiting()

    async def watch_nodes(self) -> None:
        """Drain generators that are told to go, or whose nodes are, and start others in their place, without end."""
        while True:
            await asyncio.sleep(NODE_SECONDS)
            if warned := await self.pool.warned():
                self.heed(warned)

    def heed(self, warned: Mapping[str, float | None]) -> None:
        """Generators that are about to go, with the seconds that their nodes have left (None: not told).

        They get no new groups and finish what they can; the last one that serves goes on until another one does.
        """
        for name, seconds in warned.items():
            last = len(self.pool.serving) == 1
            if name not in self._going:
                self._going.add(name)
                self._deadline = max(self._deadline, time.monotonic() + self.config.cluster.scale_timeout)
                when = f"{name} is told to go" if seconds is None else f"the node of {name} goes in {seconds:.0f} s"
                does = "goes on until another one serves" if last else "gets no new groups, and another one is started"
                self._notice("node_leaving", f"{when}: it {does}", level="warning")
            if not last:
                limit = self.config.cluster.drain_timeout
                self._generators.retire_worker(name, limit if seconds is None else min(limit, seconds))
        self._apply_moves()

    async def close(self) -> None:
        """End what is under way; the pools themselves are closed by their owner."""
        tasks = [*self._generators.tasks, *self._learners.tasks, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._hint is not None and self._waiting:
            with contextlib.suppress(Exception):
                await self._hint(None)

    # Within.

    def _apply_moves(self) -> None:
        do = moves(self.target, self.now())
        patience = max(self._deadline - time.monotonic(), 0.1)
        self._generators.start(do.start, patience)
        self._generators.withdraw(do.withdraw)
        self._generators.retire(do.retire, self.config.cluster.drain_timeout)
        if do.release:
            self._learners.release()
        if do.reserve is not None:
            self._learners.reserve(do.reserve, patience)

    def _lower_target(self) -> None:
        """A generator does not come: the run goes on with what it has."""
        self.target = Sizes(max(self.target.generators - 1, 1), self.target.learners)

    def _keep_ranks(self) -> None:
        """The learner group does not get another size."""
        self.target = Sizes(self.target.generators, self.learners.workers)

    def _give_up(self, reason: str) -> None:
        text = f"{reason}; the run goes on with {counted(self.target.generators, 'generator')}"
        self._notice("scale_failed", text, level="warning")

    def _end_waiting(self) -> None:
        if self._waiting and not self.pending:
            self._waiting = False
            if self._hint is not None:
                self._in_background(self._hint(None))

    def _wait(self) -> None:
        """A change waits for room, maybe: people are told, and the cluster."""
        self._waiting = True
        self._in_background(self._notice_if_waiting(self.target))
        if self._hint is not None:
            self._in_background(self._hint(self.target))

    async def _notice_if_waiting(self, target: Sizes) -> None:
        await asyncio.sleep(WAIT_NOTICE_SECONDS)
        waiting = sum(worker.phase is WorkerPhase.WAITING for worker in self.pool.states().values())
        if self.target == target and (waiting or self._learners.waits_for_room):
            lacks = [counted(waiting, "generator")] if waiting else []
            if self._learners.waits_for_room:
                lacks.append(counted(self.target.learners - self.learners.workers, "learner rank"))
            self._notice("scale_waiting", f"no room yet for {' and '.join(lacks)}; the run goes on, the request waits "
                         f"up to {self.config.cluster.scale_timeout:g} s (cluster.scale_timeout)")  # fmt: skip

    def _in_background(self, work: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


__all__ = ["ScaleError", "Scaler", "Sizes"]
