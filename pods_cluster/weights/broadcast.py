"""Publishing of weight versions: one broadcast group per membership, two chances per version, never a hang.

A group lives as long as its members do and nothing fails in it. After any failure every member is suspect: the group is
closed on all of them, and the full version goes out again in a new group. A worker that fails then as well, or does not
answer, is reported, and the caller kills and replaces it. An engine that failed a transfer stays closed until it holds
a full version, so no engine ever serves half of one.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.config import WeightsConfig
from pods_cluster.stopped_process import LISTEN_SECONDS, SILENT_SECONDS, Process, Unanswered, answer_of
from pods_cluster.weights.broadcast_group import (
    BroadcastGroup,
    GroupSettings,
    LearnerFailed,
    PhaseOutcome,
    ask_learner,
)
from pods_cluster.weights.protocol import TensorSpec, WeightUpdate, plan_buckets
from pods_cluster.weights.relay_plan import RelayPlanner
from pods_cluster.weights.remote_calls import start_call

_ATTEMPTS = 3
"""In the group as it is, in a new one for all, and in one more for the workers that failed only with others."""

__all__ = ["Broadcaster", "LearnerFailed", "PublishReport"]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Result of publishing one version of `nbytes` bytes.

    `failed` are the workers to kill and replace, with the reason; all others hold the version. `rebuilt` says whether a
    new group was formed, `attempts` how often the version was sent, `resent` who failed at first and took it then, and why.
    """

    version: int
    seconds: float
    nbytes: int
    failed: dict[str, str]
    rebuilt: bool
    attempts: int
    resent: dict[str, str] = field(default_factory=dict)


class Broadcaster:
    """Publishes weight versions from the learner ranks to generator workers.

    `ranks` are the learner's actor handles, rank 0 first. `gpus` says whether both pools compute on GPUs of their own,
    which decides `transport: auto`. `ranks_per_worker` is the number of group ranks of each worker (its tensor
    parallelism). `grace` seconds on top of a deadline pass before a worker that has not answered counts as hung; one whose
    process (`process_of` its name) is stopped or lost with its node is waited for no longer than seconds, and one that is
    there no more (None) not at all.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        config: WeightsConfig,
        run: str,
        *,
        gpus: bool = False,
        ranks_per_worker: int = 1,
        grace: float = 10.0,
        process_of: Callable[[str], Process | None] | None = None,
    ) -> None:
        if not ranks:
            raise ValueError("ranks: at least one learner rank is needed")
        if ranks_per_worker < 1:
            raise ValueError(f"ranks_per_worker: {ranks_per_worker} is below 1")
        self.transport = config.transport if config.transport != "auto" else ("nccl" if gpus else "gloo")
        self._ranks = list(ranks)
        self._transfer_timeout = config.transfer_timeout
        self._run = run
        self._process_of = process_of
        self._settings = GroupSettings(
            transport=self.transport,
            rendezvous_timeout=config.rendezvous_timeout,
            bucket_bytes=max(1, int(config.bucket_megabytes * 2**20)),
            ranks_per_worker=ranks_per_worker,
            grace=grace,
            verify=config.verify,
        )
        self._planner = RelayPlanner(config, self.transport, ranks_per_worker)
        self._specs: tuple[TensorSpec, ...] = ()
        self._group: BroadcastGroup | None = None
        self._stopped: dict[str, str] = {}  # of the exchange that is under way, with what to tell of each
        self._lock = asyncio.Lock()

    async def publish(self, version: int, workers: Mapping[str, Any]) -> PublishReport:
        """Send `version` (the learner's current weights) to all `workers`, name to actor handle.

        Returns when each of them holds it or is in `failed`. Raises LearnerFailed if the learner cannot send.
        """
        async with self._lock:
            return await self._deliver(version, dict(workers))

    async def catch_up(self, version: int, name: str, worker: Any) -> PublishReport:
        """Send the learner's current weights to one newcomer, in a group of two; call it between steps.

        The newcomer joins the others' group at the next `publish`, which forms a new one.
        """
        async with self._lock:
            return await self._deliver(version, {name: worker})

    async def close(self) -> None:
        """Close the group on all members, within `grace` seconds."""
        async with self._lock:
            await self._close_group()

    async def use_ranks(self, ranks: Sequence[Any]) -> None:
        """Send from these learner ranks from now on, rank 0 first; they meet the workers at the next version."""
        async with self._lock:
            await self._close_group()
            self._ranks = list(ranks)

    async def _deliver(self, version: int, workers: dict[str, Any]) -> PublishReport:
        began = time.monotonic()
        failed: dict[str, str] = {}
        at_first: dict[str, str] = {}
        rebuilt, attempt = False, 0
        self._stopped.clear()
        update = await self._plan_update(version)
        looking = asyncio.ensure_future(self._look_for_stopped(dict(workers)))
        try:
            while workers:
                attempt += 1
                if self._group is None or not self._group.has(workers):
                    rebuilt = True
                    _, learner = await self._close_group()
                    if learner:
                        raise LearnerFailed(f"version {version}: {learner}")
                    outcome = await self._meet(workers)
                else:
                    outcome = PhaseOutcome()
                if not outcome.failed:
                    assert self._group is not None
                    outcome = await self._group.transfer(update)
                if not outcome.failed:
                    break
                gone, learner = await self._close_group()
                if outcome.learner or learner:
                    raise LearnerFailed(f"version {version}: {'; '.join(outcome.learner) or learner}")
                at_first = (outcome.at_fault or outcome.first or outcome.affected) | at_first
                blamed = gone | outcome.lost
                if attempt > 1:
                    blamed |= outcome.at_fault or outcome.first
                if attempt == _ATTEMPTS or (attempt > 1 and not blamed):
                    blamed = dict.fromkeys(workers, "the group failed again")
                    blamed |= outcome.affected | outcome.at_fault | gone
                failed |= {name: reason for name, reason in blamed.items() if name in workers}
                workers = {name: handle for name, handle in workers.items() if name not in blamed}
        except BaseException:
            # Whatever interrupted this (also a cancelled publish), the group cannot be trusted any more.
            if self._group is not None:
                self._group.release()
                self._group = None
            raise
        finally:
            looking.cancel()
        resent = {name: reason for name, reason in at_first.items() if name in workers}
        return PublishReport(version, time.monotonic() - began, update.nbytes, failed, rebuilt, attempt, resent)

    async def _plan_update(self, version: int) -> WeightUpdate:
        settings = self._settings
        if not self._specs:
            seconds = settings.rendezvous_timeout + settings.grace
            self._specs = await ask_learner(self._ranks[0].weights_specs.remote(), seconds, "name its tensors")
        buckets = plan_buckets(self._specs, settings.bucket_bytes, overfill=self.transport == "nccl")
        return WeightUpdate(version, self._specs, buckets, self._transfer_timeout)

    async def _meet(self, workers: Mapping[str, Any]) -> PhaseOutcome:
        """Meet in a new group."""
        token = uuid.uuid4().hex[:12]
        plan = await self._planner.plan(workers, self._ranks[0], token)
        self._group = BroadcastGroup(f"{self._run}/weights/{token}", self._ranks, workers, plan, self._settings)
        for name, reason in self._stopped.items():
            self._group.lose(name, reason)
        return await self._group.meet()

    async def _look_for_stopped(self, workers: Mapping[str, Any]) -> None:
        """Workers that are stopped are the ones at fault in this exchange; most are over before any is asked."""
        await asyncio.sleep(LISTEN_SECONDS)
        await asyncio.gather(*(self._look_at(name, handle) for name, handle in workers.items()))

    async def _look_at(self, name: str, worker: Any) -> None:
        """Ask a worker for a sign of life again and again, until it is stopped or gone."""
        process = self._process_of(name) if self._process_of is not None else None
        while process is not None:
            try:
                await answer_of(start_call(worker.weights_location.remote()), process, math.inf)
            except Unanswered as error:
                self._stopped[name] = str(error)
                if self._group is not None:
                    self._group.lose(name, str(error))
                return
            except Exception:  # it is gone, which its part in the exchange says
                return
            await asyncio.sleep(SILENT_SECONDS)

    async def _close_group(self) -> tuple[dict[str, str], str]:
        """Close the group, if there is one. Returns what `BroadcastGroup.close` does."""
        group, self._group = self._group, None
        if group is None:
            return {}, ""
        process_of = self._process_of
        if process_of is not None:
            for name in group.names:
                if process_of(name) is None:
                    group.lose(name, "is gone")
        return await group.close()
