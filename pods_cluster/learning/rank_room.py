"""Room for the ranks of a learner group on as few nodes as possible: they exchange gradients in every step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pods_cluster.config.labels import has_labels
from pods_cluster.node_reach import elsewhere, unreached_nodes

LAST_SECONDS, STEADY_SECONDS = 5.0, 2.0
"""Longest time in which ranks that were ended give back their room; once it is there, how long it has to stay the same."""
LOOK_SECONDS = 0.25


def find_room(
    ranks: int, demand: Mapping[str, float], place: Mapping[str, str], avoid: Collection[str] = ()
) -> PlacementGroup | None:
    """Ask Ray for a placement group of a bundle for each rank, packed on as few nodes as possible; it is not waited for.

    None where there is nothing to choose: for one rank, or on a cluster with one node that has the labels `place` and is
    none of `avoid`.
    """
    if ranks < 2 or len(_nodes(place, avoid)) < 2:
        return None
    where = elsewhere(avoid, place)
    labels: dict[str, Any] = {"bundle_label_selector": [where] * ranks} if where else {}
    return placement_group([dict(demand)] * ranks, strategy="PACK", **labels)


def in_room(room: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Options of the actor that takes this bundle, which has the labels already."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(room, bundle), "label_selector": {}}


def room_for(demand: Mapping[str, float], place: Mapping[str, str], avoid: Collection[str]) -> int:
    """For how many ranks there is room now, on nodes with the labels `place` that are none of `avoid`."""
    free = available_resources_per_node()
    there = [free.get(node, {}) for node in _nodes(place, avoid)]
    return sum(
        min((int(each.get(kind, 0.0) / amount + 1e-6) for kind, amount in demand.items()), default=0) for each in there
    )


async def room_left(ranks: int, before: Sequence[str], demand: Mapping[str, float], place: Mapping[str, str]) -> int:
    """For how many of `ranks` ranks there is room once those that ran on the nodes `before` have ended; all of them where
    none of these nodes is lost, as there they fit again."""
    avoid = await unreached_nodes()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - avoid
    if alive.issuperset(before):
        return ranks
    stay = max(sum(node in alive for node in before), 1)
    room, began = room_for(demand, place, avoid), time.monotonic()
    end = began + LAST_SECONDS if room < stay else began + STEADY_SECONDS
    while room < ranks and time.monotonic() < end:
        await asyncio.sleep(LOOK_SECONDS)
        if (now := room_for(demand, place, avoid)) != room:
            room = now
            end = max(began + LAST_SECONDS, end) if room < stay else time.monotonic() + STEADY_SECONDS
    return min(room, ranks)


def _nodes(place: Mapping[str, str], avoid: Collection[str]) -> list[str]:
    nodes = [node for node in ray.nodes() if node["Alive"] and has_labels(place, node.get("Labels", {}))]
    return [node["NodeID"] for node in nodes if node["NodeID"] not in avoid]


def give_back(room: PlacementGroup) -> None:
    """Give the room back; an actor that is still in it ends."""
    with contextlib.suppress(Exception):
        remove_placement_group(room)
