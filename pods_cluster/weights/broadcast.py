"""The controller's hand on the weights: one broadcast group a membership, two chances a version, never a hang.

A group lives as long as its members do and nothing fails in it. After any failure every member is suspect: the group is
closed on all of them and the full version goes out again in a new group. Who fails then as well, or does not answer, is
reported; the caller kills and replaces it. An engine that failed a transfer keeps itself closed until it holds a full
version, so none of this ever serves half of one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.config import WeightsConfig
from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.neighbours import Neighbours
from pods_cluster.weights.protocol import (
    Invitation,
    TensorSpec,
    WeightLoadError,
    WeightSourceError,
    WeightTransferError,
    WeightUpdate,
    plan_buckets,
)
from pods_cluster.weights.relay_plan import Seating
from pods_cluster.weights.remote_calls import error_of, identity, reason_of, reply_to
from pods_cluster.weights.transport import Deadline, first_line

# The group as it is; a new one for all; one more for those whom only others made fail.
_ATTEMPTS = 3


class LearnerFailed(WeightTransferError):
    """A learner rank died or hangs: no weights can be sent; all receivers of the version stay closed until some are."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one version of `nbytes`. `failed`: workers to kill and replace, and why; all others hold it."""

    version: int
    seconds: float
    nbytes: int
    failed: dict[str, str]
    rebuilt: bool
    attempts: int


@dataclass(slots=True)
class _Group:
    name: str
    handles: dict[str, Any]
    seating: Seating
    leaving: dict[str, Any] | None = None
    patience: Deadline | None = None

    def has(self, workers: Mapping[str, Any]) -> bool:
        """Same names and the same actors behind them (a replaced worker keeps its name)."""
        return {name: identity(handle) for name, handle in self.handles.items()} == {
            name: identity(handle) for name, handle in workers.items()
        }


@dataclass(slots=True)
class _Outcome:
    """Of one phase: workers that failed by themselves (`own`) or with the group (`swept`), those `first` among them."""

    own: dict[str, str] = field(default_factory=dict)
    swept: dict[str, str] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    learner: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.own or self.swept or self.learner)


class Broadcaster:
    """Publishes weight versions from the learner ranks to generator workers.

    `ranks` are the learner's actor handles, rank 0 first. `gpus`: both pools compute on GPUs of their own (decides
    `transport: auto`). `ranks_per_worker`: group ranks that each worker takes (its tensor parallelism). `grace` seconds
    on top of a deadline pass before a worker that has not answered counts as hung.
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
    ) -> None:
        if not ranks:
            raise ValueError("ranks: at least one learner rank is needed")
        if ranks_per_worker < 1:
            raise ValueError(f"ranks_per_worker: {ranks_per_worker} is below 1")
        self.transport = config.transport if config.transport != "auto" else ("nccl" if gpus else "gloo")
        self._ranks = list(ranks)
        self._config = config
        self._run = run
        self._ranks_per_worker = ranks_per_worker
        self._grace = grace
        self._bucket_bytes = max(1, int(config.bucket_megabytes * 2**20))
        self._neighbours = Neighbours(config, self.transport, ranks_per_worker)
        self._specs: tuple[TensorSpec, ...] = ()
        self._group: _Group | None = None
        self._lock = asyncio.Lock()

    async def publish(self, version: int, workers: Mapping[str, Any]) -> PublishReport:
        """Bring `version` (the learner's current weights) to all `workers`, name to actor handle.

        Returns when each holds it or is in `failed`. Raises LearnerFailed when the sending side cannot send.
        """
        async with self._lock:
            return await self._deliver(version, dict(workers))

    async def catch_up(self, version: int, name: str, worker: Any) -> PublishReport:
        """Bring the learner's current weights to one newcomer, in a group of two; call it between steps.

        The newcomer joins the others' group at the next `publish`, which meets anew.
        """
        async with self._lock:
            return await self._deliver(version, {name: worker})

    async def close(self) -> None:
        """Close the group on all members, within `grace` seconds."""
        async with self._lock:
            await self._dissolve()

    async def follow(self, ranks: Sequence[Any]) -> None:
        """Send from these learner ranks from now on, rank 0 first; they meet the workers at the next version."""
        async with self._lock:
            await self._dissolve()
            self._ranks = list(ranks)

    async def _deliver(self, version: int, workers: dict[str, Any]) -> PublishReport:
        began = time.monotonic()
        failed: dict[str, str] = {}
        rebuilt, attempt = False, 0
        update = await self._plan(version)
        try:
            while workers:
                attempt += 1
                if self._group is None or not self._group.has(workers):
                    rebuilt = True
                    _, learner = await self._dissolve()
                    if learner:
                        raise LearnerFailed(f"version {version}: {learner}")
                    outcome = await self._build(workers)
                    if not outcome.failed:
                        outcome = await self._transfer(update)
                else:
                    outcome = await self._transfer(update)
                if not outcome.failed:
                    break
                gone, learner = await self._dissolve()
                if outcome.learner or learner:
                    raise LearnerFailed(f"version {version}: {'; '.join(outcome.learner) or learner}")
                blamed = gone
                if attempt > 1:
                    blamed = gone | (outcome.own or outcome.first)
                if attempt == _ATTEMPTS or (attempt > 1 and not blamed):
                    blamed = dict.fromkeys(workers, "the group failed again") | outcome.swept | outcome.own | gone
                failed |= {name: reason for name, reason in blamed.items() if name in workers}
                workers = {name: handle for name, handle in workers.items() if name not in blamed}
        except BaseException:
            # Whatever interrupted this (a cancelled publish too), the group cannot be trusted any more.
            if self._group is not None:
                self._release(self._group)
                self._group = None
            raise
        return PublishReport(version, time.monotonic() - began, update.nbytes, failed, rebuilt, attempt)

    async def _plan(self, version: int) -> WeightUpdate:
        if not self._specs:
            seconds = self._config.rendezvous_timeout + self._grace
            self._specs = await self._ask_learner(self._ranks[0].weights_specs.remote(), seconds, "name its tensors")
        buckets = plan_buckets(self._specs, self._bucket_bytes, overfill=self.transport == "nccl")
        return WeightUpdate(version, self._specs, buckets, self._config.transfer_timeout)

    async def _build(self, workers: dict[str, Any]) -> _Outcome:
        """Meet in a new group. Receivers are called before rank 0 goes to meet them: all must be there at once."""
        timeout = self._config.rendezvous_timeout
        token = uuid.uuid4().hex[:12]
        seating = await self._neighbours.seat(workers, self._ranks[0], token)
        receivers = seating.world_size - 1
        group = _Group(f"{self._run}/weights/{token}", dict(workers), seating)
        self._group = group
        opened = self._ranks[0].weights_open.remote(
            self.transport, group.name, receivers, timeout, seating.hub, seating.followers
        )
        host, port = await self._ask_learner(opened, timeout + self._grace, "listen for the generators")
        calls = {}
        for name, handle in workers.items():
            place = seating.seats[name]
            invitation = Invitation(
                self.transport,
                host,
                port,
                seating.world_size,
                place.rank,
                group.name,
                timeout,
                self._bucket_bytes,
                place.hub,
                place.followers,
            )
            calls[name] = handle.connect.remote(invitation)
        return await self._settle(group, calls, [self._ranks[0].weights_connect.remote(timeout)], timeout)

    async def _transfer(self, update: WeightUpdate) -> _Outcome:
        group = self._group
        assert group is not None
        calls = {name: handle.receive.remote(update) for name, handle in group.handles.items()}
        sends = [rank.weights_send.remote(update) for rank in self._ranks]
        outcome = await self._settle(group, calls, sends, update.timeout)
        if self._config.verify and not outcome.failed:
            outcome = await self._verify(group, update.timeout)
        return outcome

    async def _verify(self, group: _Group, timeout: float) -> _Outcome:
        """Fingerprints of what the engines compute with against the learner's."""
        asked = [rank.weights_fingerprints.remote() for rank in self._ranks]
        calls = {name: reply_to(handle.fingerprints.remote()) for name, handle in group.handles.items()}
        sent, *_ = await asyncio.gather(
            *(self._ask_learner(ref, timeout + self._grace, "take fingerprints") for ref in asked)
        )
        await asyncio.wait(calls.values(), timeout=timeout + self._grace)
        outcome = _Outcome()
        for name, call in calls.items():
            reason = reason_of(call, timeout) or difference(sent, call.result())
            if reason:
                outcome.own[name] = reason
        return outcome

    async def _settle(
        self, group: _Group, receivers: dict[str, Any], senders: Iterable[Any], timeout: float
    ) -> _Outcome:
        """Wait for all replies of a phase. The first failure releases everyone: nobody waits for a deadline in vain."""
        asked = {reply_to(ref): name for name, ref in receivers.items()}
        sending = [reply_to(ref) for ref in senders]
        everyone = {*asked, *sending}
        deadline = Deadline(timeout + self._grace)
        _, waiting = await asyncio.wait(everyone, timeout=deadline.left(), return_when=asyncio.FIRST_EXCEPTION)
        early = [name for call, name in asked.items() if error_of(call) is not None]
        if waiting or early or any(error_of(call) for call in sending):
            self._release(group)
            if waiting:
                await asyncio.wait(waiting, timeout=min(deadline.left(), self._grace))
        if any(not call.done() for call in sending):
            # After a failed send the ranks still gather to the end, in step.
            await asyncio.wait(sending, timeout=timeout + self._grace)

        outcome = _Outcome()
        absent: set[int] = set()
        for rank, call in enumerate(sending):
            error = error_of(call)
            if not call.done():
                outcome.learner.append(f"learner rank {rank} does not answer")
            elif error is not None and (
                not isinstance(error, WeightTransferError) or isinstance(error, WeightSourceError)
            ):
                outcome.learner.append(f"learner rank {rank}: {first_line(error)}")
            elif error is not None:
                absent.update(error.missing)
        for call in asked:
            # A hub knows which of its followers stayed away.
            missing = getattr(error_of(call), "missing", ())
            absent.update(rank for rank in missing if rank >= group.seating.world_size)
        for call, name in asked.items():
            error = error_of(call)
            taken = range(first := group.seating.seats[name].rank, first + self._ranks_per_worker)
            innocent = isinstance(error, WeightTransferError) and not isinstance(error, WeightLoadError)
            if not call.done() or (error is not None and not innocent) or absent.intersection(taken):
                outcome.own[name] = reason_of(call, timeout) or "came too late"
            elif error is not None:
                outcome.swept[name] = reason_of(call, timeout)
        outcome.first = {name: reason for name, reason in outcome.swept.items() if name in early}
        if not outcome.failed and any(error_of(call) for call in sending):
            # The sender failed with every receiver content; they are suspect all the same.
            outcome.swept = dict.fromkeys(group.handles, first_line(next(filter(None, map(error_of, sending)))))
        return outcome

    def _release(self, group: _Group) -> None:
        """Tell all to leave the group, not waiting for it; rank 0 first, as aborting it frees the others."""
        if group.leaving is None:
            sender = self._ranks[0].weights_close.remote()
            group.leaving = {name: handle.disconnect.remote() for name, handle in group.handles.items()}
            group.leaving[""] = sender
            group.patience = Deadline(self._grace)

    async def _dissolve(self) -> tuple[dict[str, str], str]:
        """Close the group on all. Returns which workers are dead or did not answer, and why; and what ails rank 0."""
        group, self._group = self._group, None
        if group is None:
            return {}, ""
        self._release(group)
        assert group.leaving is not None
        assert group.patience is not None
        calls = {name: reply_to(ref) for name, ref in group.leaving.items()}
        await asyncio.wait(calls.values(), timeout=group.patience.left())
        learner = reason_of(calls.pop(""), self._grace)
        gone = {name: reason for name, call in calls.items() if (reason := reason_of(call, self._grace))}
        return gone, learner and f"learner rank 0 could not close its broadcast group: {learner}"

    async def _ask_learner(self, ref: Awaitable[Any], seconds: float, what: str) -> Any:
        call = reply_to(ref)
        await asyncio.wait([call], timeout=seconds)
        if reason := reason_of(call, seconds):
            raise LearnerFailed(f"the learner could not {what}: {reason}")
        return call.result()
