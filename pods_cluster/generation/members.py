"""Membership of the generator pool: workers start, serve, drain and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.actor_names import actor_name
from pods_cluster.config import Config
from pods_cluster.generation.messages import Failure, GeneratorError, NodeLost, WorkerInfo, WorkerPhase, WorkerStatus
from pods_cluster.generation.node_notice import draining_nodes
from pods_cluster.generation.placement import (
    ANSWER_SECONDS,
    answer_or_none,
    create_worker,
    kill,
    worker_placed,
    worker_started,
)
from pods_cluster.node_reach import unreached_nodes
from pods_cluster.scoring.scorer_output import Printed
from pods_cluster.scoring.scoring_totals import ScoringTotals
from pods_cluster.stopped_process import Process
from pods_cluster.types import GroupId

CLOSE_SECONDS = 15.0
PLACES_TRIED = 3
"""Ray takes a minute to know that a node is gone, and may place a worker there meanwhile: it is then placed anew."""
NOTICE_SECONDS = 60.0
"""A worker is asked anew so often whether its process was told to go; it answers at once when it is."""

TakePrinted = Callable[[str, Printed], None]
"""Takes what the rewards of a worker printed, on a thread: worker's name, lines."""


@dataclass(slots=True)
class Member:
    """A worker: `load` are outstanding tokens by group, `groups` all that may have rollouts there, `sampling` rollouts in
    its engine when it last said so, and those sent since, `rate` the best tokens a second that it has kept up, `generated`
    its tokens since its start, `printed` how many lines of its rewards have been fetched, `told` the question whether it
    was told to go."""

    handle: Any
    info: WorkerInfo
    load: dict[GroupId, int] = field(default_factory=dict)
    groups: set[GroupId] = field(default_factory=set)
    sampling: int = 0
    rate: float = 0.0
    generated: int = 0
    printed: int = 0
    draining: bool = False
    unanswered: int = 0
    failure: str | None = None
    told: asyncio.Future[bool | None] | None = None
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def process(self) -> Process:
        """Its process."""
        return Process(self.info.pid, self.info.node)


@dataclass(slots=True)
class _StartingWorker:
    """A worker that does not serve yet; without `info` it has not started, without `placed` it waits for room."""

    handle: Any
    placed: bool = False
    info: WorkerInfo | None = None


class PoolMembers:
    """The membership of a pool of workers `<run>/generator/<i>`; no index is given twice.

    A new worker is prepared (it has started), then admitted (it serves). One that leaves is retired (it gets no new
    groups), drained, then dismissed. Only `admit` and `dismiss` change who gets weights.
    """

    def __init__(
        self, config: Config, selector: Any, actor_options: Mapping[str, Any] | None, printed: TakePrinted | None = None
    ) -> None:
        self.config = config
        self._take_printed = printed
        self._selector = selector
        self._options = dict(actor_options or {})
        self._members: dict[str, Member] = {}
        self._starting: dict[str, _StartingWorker] = {}
        self._next = 0
        self._gone = 0  # workers that died or hung, in whose place none serves yet
        self._replaced = 0
        self.scoring = ScoringTotals()
        """Totals of all scorers of the pool since its start."""

    @property
    def workers(self) -> dict[str, Any]:
        """Handles of the workers that serve, by name; those that drain among them."""
        return {name: member.handle for name, member in self._members.items()}

    @property
    def serving(self) -> list[str]:
        """Workers that take new groups."""
        return [name for name, member in self._members.items() if not member.draining]

    def process_of(self, name: str) -> Process | None:
        """The process of a worker that has started; None where there is none of this name."""
        there = self._members.get(name) or self._starting.get(name)
        info = there.info if there is not None else None
        return Process(info.pid, info.node) if info is not None else None

    def states(self) -> dict[str, WorkerStatus]:
        """Every worker by name, those that do not serve yet included."""
        states: dict[str, WorkerStatus] = {}
        for name, member in self._members.items():
            phase = WorkerPhase.LEAVING if member.draining else WorkerPhase.SERVING
            phase = WorkerPhase.FAILED if member.failure else phase
            states[name] = WorkerStatus(phase, member.info, member.generated, member.rate)
        for name, worker in self._starting.items():
            phase = WorkerPhase.STARTING if worker.placed else WorkerPhase.WAITING
            states[name] = WorkerStatus(WorkerPhase.READY if worker.info else phase, worker.info)
        return states

    async def start(self) -> None:
        """Start all workers and wait for their engines. Raises GeneratorError with the cause; none is left then."""
        await self.add(self.config.generator.workers)

    async def add(self, count: int = 1) -> list[str]:
        """Start `count` more workers, without published weights. Raises GeneratorError; none of them is left then."""
        placement = self.config.cluster.placement_timeout
        names = [self._name() for _ in range(count)]
        starts = [asyncio.ensure_future(self._prepare(name, placement)) for name in names]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for name in names:
                self.withdraw(name)
            raise
        for name in names:
            self.admit(name)
        return names

    async def prepare(self, placement: float) -> str:
        """Start one worker that does not serve yet; its name. It may wait `placement` seconds for room.

        Raises NoRoom and GeneratorError. Cancelled, or failed, it leaves nothing behind.
        """
        name = self._name()
        await self._prepare(name, placement)
        return name

    def prepared_worker(self, name: str) -> Any:
        """Handle of a prepared worker."""
        return self._starting[name].handle

    def admit(self, name: str) -> None:
        """A prepared worker serves from now on."""
        worker = self._starting.pop(name)
        assert worker.info is not None
        self._members[name] = Member(worker.handle, worker.info)
        if self._gone:
            self._gone -= 1
            self._replaced += 1

    def withdraw(self, name: str) -> None:
        """End a worker that does not serve yet."""
        worker = self._starting.pop(name, None)
        if worker is not None:
            kill(worker.handle)

    def retire(self, count: int) -> list[str]:
        """The `count` least loaded workers get no new groups any more; their names. At least one stays.

        Raises GeneratorError.
        """
        serving = self.serving
        if not 0 < count < len(serving):
            raise GeneratorError(f"retire: {count} of {len(serving)} workers: at least one must stay")
        leaving = sorted(serving, key=lambda name: sum(self._members[name].load.values()))[:count]
        self.retire_workers(leaving)
        return leaving

    def retire_workers(self, names: Sequence[str]) -> None:
        """These workers get no new groups any more."""
        for name in names:
            self._members[name].draining = True

    async def warned(self) -> dict[str, float | None]:
        """Serving workers whose nodes are about to go, and the seconds that those have left (None: not told), and those whose
        process got SIGTERM."""
        going = await asyncio.to_thread(draining_nodes)
        serving = {name: member for name, member in self._members.items() if not member.draining}
        told: dict[str, float | None] = {name: None for name, member in serving.items() if self._told_to_go(member)}
        return told | {name: going[m.info.node] for name, m in serving.items() if m.info.node in going}

    @staticmethod
    def _told_to_go(member: Member) -> bool:
        """Whether this worker has said that it got SIGTERM; one question is always on its way to it."""
        if member.told is not None and member.told.done():
            if member.told.result():
                return True
            member.told = None
        if member.told is None and member.failure is None:
            question = member.handle.wait_for_sigterm.remote(NOTICE_SECONDS)
            member.told = asyncio.ensure_future(answer_or_none(question, NOTICE_SECONDS + ANSWER_SECONDS))
        return False

    async def drain(self, name: str, timeout: float) -> None:
        """Wait until every rollout of a retired worker was taken or dropped, it died, or `timeout` seconds passed."""
        member = self._members.get(name)
        if member is None:
            return
        left = await answer_or_none(member.handle.drain.remote(timeout), timeout + ANSWER_SECONDS)
        if left is not None:
            member.groups = {GroupId(*group) for group in left}

    async def dismiss(self, name: str) -> Failure | None:
        """End a retired worker. What it still had is in the failure; None when it is gone already."""
        member = self._members.get(name)
        if member is None:
            return None  # it failed meanwhile, and was reported
        await self._fetch_printed(name, member)
        await answer_or_none(member.handle.shutdown.remote(), CLOSE_SECONDS, member.process)
        if name not in self._members:
            return None
        return self._discard(name, "left the pool before its rollouts were taken")

    async def replace(self, worker: str) -> str:
        """Start a worker in place of one that `check` or `fail` reported; returns its name. It holds no weights yet."""
        if worker in self._members:
            self._discard(worker, "replaced")
        (name,) = await self.add(1)
        return name

    async def close(self) -> None:
        """End all workers."""
        for name in list(self._starting):
            self.withdraw(name)
        members, self._members = self._members, {}
        await asyncio.gather(*(self._fetch_printed(name, member) for name, member in members.items()))
        calls = [
            answer_or_none(member.handle.shutdown.remote(), CLOSE_SECONDS, member.process)
            for member in members.values()
        ]
        await asyncio.gather(*calls)
        for member in members.values():
            self._end(member)

    @staticmethod
    def _end(member: Member) -> None:
        if member.told is not None:
            member.told.cancel()
        kill(member.handle)

    async def _fetch_printed(self, name: str, member: Member) -> None:
        """Hand on what the worker's rewards have printed since the last time; a dead worker has nothing more to say."""
        if self._take_printed is None or member.failure is not None:
            return
        async with member.fetching:
            asked = member.handle.printed.remote(member.printed)
            found: Printed | None = await answer_or_none(asked, ANSWER_SECONDS, member.process)
            if found is not None and found.next > member.printed:
                member.printed = found.next
                await asyncio.to_thread(self._take_printed, name, found)

    async def _prepare(self, name: str, placement: float) -> None:
        for _ in range(PLACES_TRIED - 1):
            with contextlib.suppress(NodeLost):
                return await self._start(name, placement)
        await self._start(name, placement)

    async def _start(self, name: str, placement: float) -> None:
        try:
            avoid = await unreached_nodes()
            handle = create_worker(self.config, name, self._selector, self._options, avoid)
            worker = self._starting[name] = _StartingWorker(handle)
            await worker_placed(self.config, name, handle, placement)
            worker.placed = True
            worker.info = await worker_started(self.config, name, handle)
        except BaseException:
            self.withdraw(name)
            raise

    def _name(self) -> str:
        index, self._next = self._next, self._next + 1
        return actor_name(self.config.run.name, "generator", index)

    def _discard(self, name: str, reason: str) -> Failure:
        member = self._members.pop(name)
        self._end(member)
        self.scoring.worker_gone(name)
        self._gone += not member.draining
        return Failure(name, reason, sorted(member.groups), leaving=member.draining)
