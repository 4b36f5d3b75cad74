"""One broadcast group: learner rank 0 and the workers of one membership, driven from the controller's event loop.

Every phase (rendezvous, transfer, verification) has a deadline, and its first failure releases everyone, so that nobody
waits for the deadline in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.protocol import (
    Invitation,
    WeightLoadError,
    WeightSourceError,
    WeightTransferError,
    WeightUpdate,
)
from pods_cluster.weights.relay_plan import RelayPlan
from pods_cluster.weights.remote_calls import (
    actor_identity,
    failure_reason,
    original_error,
    shared_argument,
    start_call,
)
from pods_cluster.weights.transport import Deadline, first_line


class LearnerFailed(WeightTransferError):
    """A learner rank died or hangs, so no weights can be sent; receivers stay closed until a full version comes."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the broadcast groups of a run.

    `grace` seconds on top of a deadline pass before a worker that has not answered counts as hung. With `verify`,
    fingerprints of what the engines compute with are compared after each transfer.
    """

    transport: str
    rendezvous_timeout: float
    bucket_bytes: int
    ranks_per_worker: int
    grace: float
    verify: bool


@dataclass(slots=True)
class PhaseOutcome:
    """Outcome of one phase: reasons of failure by worker, and failures of learner ranks.

    A worker is at fault if its failure is its own (`at_fault`), or only `affected` by that of another member. `first`
    are the affected ones that had failed when the phase was stopped, `lost` those at fault that others told of.
    """

    at_fault: dict[str, str] = field(default_factory=dict)
    affected: dict[str, str] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    learner: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anyone failed."""
        return bool(self.at_fault or self.affected or self.learner)


class BroadcastGroup:
    """A group over the learner `ranks` (rank 0 sends) and `workers`, which have the roles of `plan`."""

    def __init__(
        self, name: str, ranks: Sequence[Any], workers: Mapping[str, Any], plan: RelayPlan, settings: GroupSettings
    ) -> None:
        self.name = name
        self._ranks = list(ranks)
        self._workers = dict(workers)
        self._plan = plan
        self._settings = settings
        self._lost: dict[str, str] = {}
        self._told: asyncio.Event | None = None  # of the phase that is under way
        self._closing: dict[str, Any] | None = None
        self._closing_deadline = Deadline(settings.grace)

    @property
    def names(self) -> list[str]:
        """Names of the workers in it."""
        return list(self._workers)

    def has(self, workers: Mapping[str, Any]) -> bool:
        """Whether these are its members: the same names with the same actors behind them."""
        return {name: actor_identity(handle) for name, handle in self._workers.items()} == {
            name: actor_identity(handle) for name, handle in workers.items()
        }

    def lose(self, name: str, reason: str) -> None:
        """Wait for this worker no more: it is stopped, or gone. The phase ends, and it is the one at fault."""
        if name in self._workers:
            self._lost[name] = reason
            if self._told is not None:
                self._told.set()

    async def meet(self) -> PhaseOutcome:
        """Rendezvous of all members. Raises LearnerFailed if rank 0 cannot listen."""
        settings, plan, timeout = self._settings, self._plan, self._settings.rendezvous_timeout
        opened = self._ranks[0].weights_open.remote(
            settings.transport, self.name, plan.world_size - 1, timeout, plan.hub, plan.followers
        )
        host, port = await ask_learner(opened, timeout + settings.grace, "listen for the generators")
        # Receivers are called before rank 0 goes to meet them, because all must be there at once.
        calls = {}
        for name, handle in self._workers.items():
            role = plan.roles[name]
            invitation = Invitation(
                transport=settings.transport,
                host=host,
                port=port,
                world_size=plan.world_size,
                rank=role.rank,
                name=self.name,
                timeout=timeout,
                bucket_bytes=settings.bucket_bytes,
                hub=role.hub,
                followers=role.followers,
            )
            calls[name] = handle.connect.remote(invitation)
        return await self._run_phase(calls, [self._ranks[0].weights_connect.remote(timeout)], timeout)

    async def transfer(self, update: WeightUpdate) -> PhaseOutcome:
        """Send `update` from all learner ranks to all workers, and verify it if so configured."""
        described = shared_argument(update)
        calls = {name: handle.receive.remote(described) for name, handle in self._workers.items()}
        sends = [rank.weights_send.remote(described) for rank in self._ranks]
        outcome = await self._run_phase(calls, sends, update.timeout)
        if self._settings.verify and not outcome.failed:
            outcome = await self._verify(update.timeout)
        return outcome

    async def _verify(self, timeout: float) -> PhaseOutcome:
        """Compare fingerprints of what the engines compute with to the learner's."""
        seconds = timeout + self._settings.grace
        asked = [rank.weights_fingerprints.remote() for rank in self._ranks]
        calls = {name: start_call(handle.fingerprints.remote()) for name, handle in self._workers.items()}
        sent, *_ = await asyncio.gather(*(ask_learner(ref, seconds, "take fingerprints") for ref in asked))
        await asyncio.wait(calls.values(), timeout=seconds)
        outcome = PhaseOutcome()
        for name, call in calls.items():
            reason = failure_reason(call, timeout) or difference(sent, call.result())
            if reason:
                outcome.at_fault[name] = reason
        return outcome

    async def _run_phase(self, receivers: Mapping[str, Any], senders: Iterable[Any], timeout: float) -> PhaseOutcome:
        """Wait for all calls of a phase, and find out who failed and whose fault it was."""
        grace = self._settings.grace
        receiving = {start_call(ref): name for name, ref in receivers.items()}
        sending = [start_call(ref) for ref in senders]
        deadline = Deadline(timeout + grace)
        waiting = await self._until_failure({*receiving, *sending}, deadline)
        early = [name for call, name in receiving.items() if original_error(call) is not None]
        if waiting or early or any(original_error(call) for call in sending):
            self.release()
            waiting -= {call for call, name in receiving.items() if name in self._lost}
            if waiting:
                await asyncio.wait(waiting, timeout=min(deadline.left(), grace))
        if any(not call.done() for call in sending):
            # After a failed send the ranks still gather to the end, in step.
            await asyncio.wait(sending, timeout=timeout + grace)

        outcome = PhaseOutcome()
        absent = self._judge_senders(sending, outcome)
        for call in receiving:
            # A hub knows which of its followers did not come.
            missing = getattr(original_error(call), "missing", ())
            absent.update(rank for rank in missing if rank >= self._plan.world_size)
        for call, name in receiving.items():
            error = original_error(call)
            first = self._plan.roles[name].rank
            ranks = range(first, first + self._settings.ranks_per_worker)
            innocent = isinstance(error, WeightTransferError) and not isinstance(error, WeightLoadError)
            if name in self._lost:
                call.cancel()
                outcome.at_fault[name] = outcome.lost[name] = self._lost[name]
            elif not call.done() or (error is not None and not innocent) or absent.intersection(ranks):
                outcome.at_fault[name] = failure_reason(call, timeout) or "came too late"
            elif error is not None:
                outcome.affected[name] = failure_reason(call, timeout)
        outcome.first = {name: reason for name, reason in outcome.affected.items() if name in early}
        if not outcome.failed and any(original_error(call) for call in sending):
            # The sender failed although no receiver did; all of them are suspect.
            error = next(filter(None, map(original_error, sending)))
            outcome.affected = dict.fromkeys(self._workers, first_line(error))
        return outcome

    async def _until_failure(self, calls: set[asyncio.Future[Any]], deadline: Deadline) -> set[asyncio.Future[Any]]:
        """Wait until all calls are done, one fails, a member is told to be lost, or the deadline; those not done."""
        self._told = asyncio.Event()
        if self._lost:
            self._told.set()
        told = asyncio.ensure_future(self._told.wait())
        waiting = calls
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    {*waiting, told}, timeout=deadline.left(), return_when=asyncio.FIRST_COMPLETED
                )
                waiting = waiting - done
                if not done or told in done or any(original_error(call) is not None for call in done):
                    break
        finally:
            told.cancel()
        return waiting

    @staticmethod
    def _judge_senders(sending: Sequence[asyncio.Future[Any]], outcome: PhaseOutcome) -> set[int]:
        """Note which learner ranks failed by themselves. Returns the ranks of receivers that did not come."""
        absent: set[int] = set()
        for rank, call in enumerate(sending):
            error = original_error(call)
            if not call.done():
                outcome.learner.append(f"learner rank {rank} does not answer")
            elif error is not None and (
                not isinstance(error, WeightTransferError) or isinstance(error, WeightSourceError)
            ):
                outcome.learner.append(f"learner rank {rank}: {first_line(error)}")
            elif error is not None:
                absent.update(error.missing)
        return absent

    def release(self) -> None:
        """Tell all members to leave, without waiting; rank 0 first, because aborting it frees the others."""
        if self._closing is None:
            sender = self._ranks[0].weights_close.remote()
            self._closing = {name: handle.disconnect.remote() for name, handle in self._workers.items()}
            self._closing[""] = sender
            self._closing_deadline = Deadline(self._settings.grace)

    async def close(self) -> tuple[dict[str, str], str]:
        """Close the group on all members.

        Returns which workers are dead or did not answer, with the reason, and what is wrong with rank 0 ("": nothing).
        """
        self.release()
        assert self._closing is not None
        calls = {name: start_call(ref) for name, ref in self._closing.items()}
        for name in self._lost:
            calls.pop(name).cancel()
        await asyncio.wait(calls.values(), timeout=self._closing_deadline.left())
        grace = self._settings.grace
        learner = failure_reason(calls.pop(""), grace)
        gone = {name: reason for name, call in calls.items() if (reason := failure_reason(call, grace))} | self._lost
        return gone, learner and f"learner rank 0 could not close its broadcast group: {learner}"


async def ask_learner(ref: Awaitable[Any], seconds: float, what: str) -> Any:
    """Reply of a learner rank within `seconds`. Raises LearnerFailed, with `what` the rank was to do."""
    call = start_call(ref)
    await asyncio.wait([call], timeout=seconds)
    if reason := failure_reason(call, seconds):
        raise LearnerFailed(f"the learner could not {what}: {reason}")
    return call.result()
