"""Plan of a broadcast group: which receivers are its members, and which get the weights from a relay hub beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pods_cluster.config import WeightsConfig
from pods_cluster.weights.remote_calls import actor_identity, failure_reason, start_call


@dataclass(frozen=True, slots=True)
class WorkerLocation:
    """Location of a process: its Ray node, and its one card ("": none, or several)."""

    node: str = ""
    card: str = ""

    @classmethod
    def current(cls) -> WorkerLocation:
        """Location of the Ray worker that this runs in; outside of Ray it is not known."""
        import ray

        if not ray.is_initialized():
            return cls()
        context = ray.get_runtime_context()
        cards = context.get_accelerator_ids().get("GPU", [])
        return cls(context.get_node_id(), cards[0] if len(cards) == 1 else "")

    def shared_resource(self, kind: str) -> str:
        """Name of the `kind` ("card" or "node") that processes in the same location share; "": they share none."""
        if not self.node or (kind == "card" and not self.card):
            return ""
        return f"{self.node}/{self.card}" if kind == "card" else self.node


@dataclass(frozen=True, slots=True)
class ReceiverRole:
    """Role of one receiver: its (first) rank, and its relay hub.

    With `followers` (their ranks) the receiver opens `hub` for them; with a `hub` alone it is a follower itself.
    """

    rank: int
    hub: str = ""
    followers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """Roles of all receivers, by worker name, and the sender's own `hub` and `followers`.

    `world_size` counts the members of the broadcast group, the sender among them. Followers are no members; their ranks
    go on from there.
    """

    world_size: int
    roles: dict[str, ReceiverRole]
    hub: str = ""
    followers: tuple[int, ...] = ()


def plan_relay(
    workers: Sequence[str],
    shared: Mapping[str, str],
    sender: str = "",
    *,
    ranks_per_worker: int = 1,
    token: str = "",
) -> RelayPlan:
    """Give every worker a role. Workers with the same `shared` resource (not "") form one relay.

    The first of them becomes a member and the hub of the others, unless the sender shares the resource too (`sender` is
    its name): then all of them follow the sender. Engines of several ranks each (`ranks_per_worker`) have whole cards,
    so all of them are members. `token` makes the hubs' names unique.
    """
    resources = {name: shared.get(name, "") if ranks_per_worker == 1 else "" for name in workers}
    hubs: dict[str, str] = {}
    followers_of: dict[str, list[str]] = {}
    if sender:
        hubs[sender], followers_of[sender] = f"{token}.sender", []
    members: dict[str, int] = {}  # first rank of each
    for name in workers:
        resource = resources[name]
        if resource and resource in hubs:
            followers_of[resource].append(name)
            continue
        members[name] = 1 + len(members) * ranks_per_worker
        if resource:
            hubs[resource], followers_of[resource] = f"{token}.{len(members)}", []
    world_size = 1 + len(members) * ranks_per_worker
    follower_names = [name for names in followers_of.values() for name in names]
    follower_ranks = {name: rank for rank, name in enumerate(follower_names, start=world_size)}
    followers = {resource: tuple(follower_ranks[name] for name in names) for resource, names in followers_of.items()}
    roles: dict[str, ReceiverRole] = {}
    for name in workers:
        resource = resources[name]
        if name in follower_ranks:
            roles[name] = ReceiverRole(follower_ranks[name], hubs[resource])
        elif others := followers.get(resource, ()):
            roles[name] = ReceiverRole(members[name], hubs[resource], others)
        else:
            roles[name] = ReceiverRole(members[name])
    own = followers.get(sender, ())
    return RelayPlan(world_size, roles, hubs[sender] if own else "", own)


class RelayPlanner:
    """Plans the broadcast groups of a run by `weights.relay`, asking each worker for its location once in its life."""

    def __init__(self, config: WeightsConfig, transport: str, ranks_per_worker: int) -> None:
        # NCCL takes one process per card; engines of several ranks have whole cards.
        kind = "card" if transport == "nccl" and config.relay == "auto" else config.relay
        self._kind = kind if kind in ("card", "node") and ranks_per_worker == 1 else ""
        self._ranks_per_worker = ranks_per_worker
        self._seconds = config.rendezvous_timeout
        self._locations: dict[Any, WorkerLocation] = {}

    async def plan(self, workers: Mapping[str, Any], sender: Any, token: str) -> RelayPlan:
        """Plan a group of `workers` (name to actor handle) and the `sender`, learner rank 0.

        A worker that does not answer within `weights.rendezvous_timeout` is taken to share nothing; if it is gone, the
        rendezvous shows it.
        """
        if not self._kind:
            return plan_relay(list(workers), {}, ranks_per_worker=self._ranks_per_worker, token=token)
        everyone = {**workers, "": sender}
        unknown = {name: handle for name, handle in everyone.items() if actor_identity(handle) not in self._locations}
        calls = {name: start_call(handle.weights_location.remote()) for name, handle in unknown.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=self._seconds)
        for name, call in calls.items():
            if not failure_reason(call, self._seconds):
                self._locations[actor_identity(unknown[name])] = call.result()
        locations = {
            name: self._locations.get(actor_identity(handle), WorkerLocation()) for name, handle in everyone.items()
        }
        shared = {name: location.shared_resource(self._kind) for name, location in locations.items()}
        return plan_relay(list(workers), shared, shared[""], token=token)
