"""The ranks of a learner group as Ray actors: placement, start and end, and calls to all of them with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray import exceptions

from pods_cluster.actor_names import NAMESPACE, actor_name, demand
from pods_cluster.config import Config
from pods_cluster.learning.rank import LearnerRank
from pods_cluster.learning.rank_room import PlacementGroup, find_room, give_back, in_room, room_for, room_left
from pods_cluster.learning.reports import LearnerError, RankInfo
from pods_cluster.node_reach import elsewhere, unreached_nodes
from pods_cluster.stopped_process import LISTEN_SECONDS, SILENT_SECONDS, Process, Silence, Unanswered
from pods_cluster.wording import counted

RESOURCE = "pods_learner"
REPLY_TIMEOUT = 30.0
"""Seconds in which a rank answers a call that computes nothing."""
SILENCE_SECONDS = 30.0
"""A rank that does not answer for so long hangs, whatever it was asked to do; one whose group writes or reads a state may be
silent for `_WRITING_SILENCE`, as large files can hold Python up. One that is stopped is noticed sooner."""
_WRITING_SILENCE = 120.0
_LOOK_SECONDS = 2.0
_CLOSE_TIMEOUT = 10.0
_WRITING = ("save", "load", "export", "put a checkpoint in its place")
# Ray leaves a process that asked for no card all cards of its node.
_NO_GPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def rank_demand(config: Config, offered: Mapping[str, float]) -> dict[str, float]:
    """Ray resources that one rank asks for, on a cluster that offers `offered`."""
    learner = config.learner
    return demand(RESOURCE, learner.cpus_per_worker, learner.gpus(offered.get("GPU", 0.0)), offered)


@dataclass(frozen=True, slots=True)
class _RankActor:
    name: str
    handle: Any
    room: PlacementGroup | None = None


class RankActors:
    """The actors of a learner group of `workers` ranks.

    The first failure of a call breaks the whole group, because the other ranks may wait for the failed one for ever.
    """

    def __init__(self, config: Config, actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.workers = config.learner.workers
        self.infos: list[RankInfo] = []
        self._extra_options = actor_options
        self._ranks: list[_RankActor] = []
        self._reserved: list[_RankActor] = []
        self._next = 0
        self._broken: str | None = None
        self._doing = ""
        self._silent: dict[str, Silence] = {}  # of the ranks that have started

    @property
    def handles(self) -> list[Any]:
        """The ranks' actor handles, rank 0 first."""
        return [rank.handle for rank in self._ranks]

    @property
    def names(self) -> list[str]:
        """The ranks' actor names, rank 0 first."""
        return [rank.name for rank in self._ranks]

    async def start(self) -> list[RankInfo]:
        """Create the actors, let them meet and load the model. Raises LearnerError with the first failed rank's cause."""
        timeout = self.config.learner.start_timeout
        avoid = await unreached_nodes() if len(self._reserved) < self.workers else ()
        reserved, self._reserved = self._reserved, []
        self._ranks = reserved[: self.workers]
        self._end(reserved[self.workers :])
        self._ranks = [*self._create(range(self.workers - len(reserved)), avoid), *self._ranks]
        for rank in self._ranks:  # all at once: the others would wait for the imports of the one that has the store
            rank.handle.prepare.remote()
        opening = self._ranks[0].handle.open_store.remote(self.workers, timeout)
        host, port = await self._call_one(opening, timeout, "open their rendezvous store")
        calls = [
            rank.handle.start.remote(number, self.workers, host, port, timeout)
            for number, rank in enumerate(self._ranks)
        ]
        self.infos = await self._call_all(calls, timeout, "start")
        self._silent = {name: Silence() for name in self.names}
        return self.infos

    async def watch(self) -> None:
        """Raise LearnerError once a rank is dead, stopped or lost with its node (noticed when it has been silent for seconds),
        or has not answered for `SILENCE_SECONDS`, whatever it was asked to do; go on without end otherwise."""
        asked: dict[str, asyncio.Future[Any]] = {}
        while True:
            near = any(silence.seconds >= SILENT_SECONDS for silence in self._silent.values())
            await asyncio.sleep(LISTEN_SECONDS if near else _LOOK_SECONDS)
            silent: list[tuple[str, RankInfo]] = []
            for number, rank in enumerate(self._ranks):
                if rank.name not in self._silent:  # it starts
                    continue
                ping = asked.setdefault(rank.name, asyncio.wrap_future(rank.handle.ping.remote().future()))
                if not ping.done():
                    silent.append((rank.name, self.infos[number]))
                    continue
                del asked[rank.name]
                if (error := ping.exception()) is not None:
                    raise self._break("answer", [error], set())
                self._silent[rank.name].end()
            await asyncio.gather(*(self._complain_if_silent(*rank) for rank in silent))

    async def _complain_if_silent(self, name: str, info: RankInfo) -> None:
        silence = self._silent[name]
        silence.goes_on()
        try:
            await silence.check(
                Process(info.pid, info.node_id), _WRITING_SILENCE if self._doing in _WRITING else SILENCE_SECONDS
            )
        except Unanswered as error:
            self._broken = f"{name} {error}"
            raise LearnerError(f"learner rank {self._broken}") from error

    async def reserve(self, workers: int, timeout: float) -> None:
        """Place the actors that a group of `workers` needs beyond this one's; they do nothing yet.

        Raises LearnerError after `timeout` seconds; a call that fails or is cancelled keeps none of them.
        """
        await self._reserve(range(self.workers, workers), timeout)

    async def place_ranks(self, timeout: float) -> None:
        """Place this group's actors before `start`, so that Ray finds room for them before it does for the generators,
        whose smaller parts of a card fit anywhere. Raises LearnerError after `timeout` seconds."""
        await self._reserve(range(self.workers), timeout)

    async def _reserve(self, numbers: range, timeout: float) -> None:
        self.release()
        more = self._create(numbers, await unreached_nodes())
        self._reserved = more
        who = counted(len(more), "more learner rank" if numbers.start else "learner rank")
        calls = [asyncio.wrap_future(rank.handle.ping.remote().future()) for rank in more]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), timeout)
        except BaseException as error:
            if self._reserved is more:  # a later call may have begun before this one learned of its cancellation
                self._reserved = []
            self._end(more)
            if isinstance(error, TimeoutError):
                raise LearnerError(f"{who} could not be placed within {timeout:g} s") from None
            if isinstance(error, exceptions.RayError):
                raise LearnerError(f"{who} did not come up: {_cause(error)}") from error
            raise

    async def _place_or_shrink(self, *, patient: bool) -> None:
        """Place the actors of this group before `start`; where a node is gone, as many as there is room for, at once or
        (`patient`) after `cluster.placement_timeout`.

        Raises LearnerError where there is room for none, or another number of ranks cannot read the state.
        """
        timeout, place = self.config.cluster.placement_timeout, self.config.learner.place
        demand, before = rank_demand(self.config, ray.cluster_resources()), [info.node_id for info in self.infos]
        resizable = self.config.learner.resizable
        if resizable and not patient:
            self.workers = await room_left(self.workers, before, demand, place) or self.workers
        try:
            await self.place_ranks(timeout)
        except LearnerError:
            room = room_for(demand, place, await unreached_nodes())
            if not resizable or not 1 <= room < self.workers:
                raise
            self.workers = room
            await self.place_ranks(timeout)

    def release(self) -> None:
        """End the actors that `reserve` or `place_ranks` placed and `start` did not use."""
        reserved, self._reserved = self._reserved, []
        self._end(reserved)

    def _create(self, numbers: range, avoid: Collection[str]) -> list[_RankActor]:
        """Create the actors of these ranks on other nodes than `avoid`, together where the cluster leaves a choice."""
        learner = self.config.learner
        threads = learner.threads or max(int(learner.cpus_per_worker), 1)
        actor = cast(Any, ray.remote)(concurrency_groups={"control": 2})(LearnerRank)
        room = None
        if not self._extra_options:
            room = find_room(len(numbers), rank_demand(self.config, ray.cluster_resources()), learner.place, avoid)
        created = []
        for bundle, number in enumerate(numbers):
            name = actor_name(self.config.run.name, "learner", self._next)
            self._next += 1
            options = self._actor_options(name, number, threads, avoid) | (
                in_room(room, bundle) if room is not None else {}
            )
            created.append(_RankActor(name, actor.options(**options).remote(self.config, threads), room))
        return created

    def _end(self, ranks: Sequence[_RankActor]) -> None:
        """End these actors, and give back room that no other one is in."""
        for rank in ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank.handle)
        needed = [rank.room for rank in (*self._ranks, *self._reserved)]
        for room in {rank.room.id: rank.room for rank in ranks if rank.room is not None}.values():
            if not any(other is not None and other.id == room.id for other in needed):
                give_back(room)

    def _actor_options(self, name: str, number: int, threads: int, avoid: Collection[str]) -> dict[str, Any]:
        offered = ray.cluster_resources()
        demand = rank_demand(self.config, offered)
        gpus = demand.get("GPU", 0.0)
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "num_cpus": demand.get("CPU", 0.0),
            "num_gpus": gpus,
            "resources": {RESOURCE: 1} if offered.get(RESOURCE) else {},
            "label_selector": elsewhere(avoid, self.config.learner.place),
            "max_restarts": 0,  # one rank cannot rejoin: the group is started again as a whole
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), **({} if gpus else _NO_GPU)}},
        }
        extra = self._extra_options
        if not isinstance(extra, Mapping):
            extra = extra[number] if extra else {}
        return {**options, **extra}

    async def close(self) -> None:
        """End all ranks, working or not, and the reserved ones; safe to call twice."""
        self.release()
        await self.end_ranks()

    def give_up(self, cause: str) -> None:
        """The ranks cannot be used any more, and are not asked to end by themselves."""
        self._broken = self._broken or cause

    async def end_ranks(self) -> None:
        """End the ranks; the group may be started again."""
        ranks, self._ranks = self._ranks, []
        self._silent = {}
        if ranks and self._broken is None:
            with contextlib.suppress(Exception):
                calls = [asyncio.wrap_future(rank.handle.shutdown.remote().future()) for rank in ranks]
                await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), _CLOSE_TIMEOUT)
        self._broken = None
        self._end(ranks)

    async def _call_one(self, call: Any, timeout: float, doing: str) -> Any:
        return (await self._call_all([call], timeout, doing))[0]

    async def _call_all(self, calls: Sequence[Any], timeout: float, doing: str) -> list[Any]:
        """Answers of all ranks. The first failure, or a rank that is late, breaks the group and raises LearnerError."""
        if self._broken is not None:
            raise LearnerError(f"the learner group is broken ({self._broken}); start a new one")
        if not calls:
            raise LearnerError("the learner group is not started")
        futures = [asyncio.wrap_future(call.future()) for call in calls]
        self._doing = doing
        try:
            done, pending = await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._doing = ""
        for future in futures:
            if future in done and future.exception() is not None:
                raise self._break(doing, [f.exception() for f in done if f.exception() is not None], pending)
        if pending:
            late = ", ".join(str(rank) for rank, future in enumerate(futures) if future in pending)
            for future in pending:
                future.cancel()
            self._broken = f"rank(s) {late} did not {doing} within {timeout:g} s"
            raise LearnerError(f"learner {self._broken}")
        return [future.result() for future in futures]

    def _break(self, doing: str, errors: list[BaseException | None], pending: set[asyncio.Future[Any]]) -> LearnerError:
        for future in pending:
            future.cancel()
        causes = [_cause(error) for error in errors if error is not None]
        causes.sort(key=_is_consequence)  # a failure that only follows from another rank's end tells less
        self._broken = causes[0]
        return LearnerError(f"learner rank(s) failed to {doing}: {causes[0]}")


def _cause(error: BaseException) -> str:
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        return f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    if isinstance(error, exceptions.RayActorError):
        return f"its process died: {error}"
    return f"{type(error).__name__}: {error}"


def _is_consequence(cause: str) -> bool:
    """Whether a failure says only that another rank went away."""
    return any(
        sign in cause for sign in ("Connection closed by peer", "Connection reset by peer", "gloo", "ncclRemoteError")
    )
