"""Room for the ranks of a learner group on as few nodes as possible: they exchange gradients in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pods_cluster.config.labels import has_labels


def find_room(ranks: int, demand: Mapping[str, float], place: Mapping[str, str]) -> PlacementGroup | None:
    """Ask Ray for a placement group of a bundle for each rank, packed on as few nodes as possible; it is not waited for.

    None where there is nothing to choose: for one rank, or on a cluster with one node that has the labels `place`.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and has_labels(place, node.get("Labels", {}))]
    if ranks < 2 or len(nodes) < 2:
        return None
    labels: dict[str, Any] = {"bundle_label_selector": [dict(place)] * ranks} if place else {}
    return placement_group([dict(demand)] * ranks, strategy="PACK", **labels)


def in_room(room: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Options of the actor that takes this bundle, which has the labels already."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(room, bundle), "label_selector": {}}


def give_back(room: PlacementGroup) -> None:
    """Give the room back; an actor that is still in it ends."""
    with contextlib.suppress(Exception):
        remove_placement_group(room)
