"""Rollouts on a node that is lost are given up in seconds; the others are taken. Real actors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from pods_cluster import node_reach
from pods_cluster.generation.packed_rollouts import PackedRollouts, pack
from pods_cluster.learning import fetch_rollouts
from pods_cluster.learning.fetch_rollouts import RolloutFetcher
from pods_cluster.types import GroupId, Locator
from tests.learning.support import WORKER, make_step

LOST = f"{WORKER}-lost"


class Holder:
    def __init__(self, held: dict[Any, Any]) -> None:
        self.held = held

    def take(self, wanted: Sequence[tuple[GroupId, Sequence[int]]]) -> PackedRollouts:
        return pack([self.held[(GroupId(*group), index)] for group, indices in wanted for index in indices], {})


class Silent:
    """As it is seen from another node, once its own is cut off."""

    def take(self, _: object) -> None:
        threading.Event().wait(600)


def test_rollouts_on_a_lost_node_are_given_up_and_the_others_taken(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollouts = make_step(0)
    held = {(locator.group, locator.index): rollout for locator, rollout in rollouts.items()}
    options = {"num_cpus": 0, "namespace": "pods"}
    actors = [
        ray.remote(Holder).options(name=WORKER, **options).remote(held),
        ray.remote(Silent).options(name=LOST, **options).remote(),
    ]
    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(fetch_rollouts, "reaches_now", lambda node: node != here)
    for name, seconds in (("SILENT_SECONDS", 0.2), ("LISTEN_SECONDS", 0.1), ("UNREACHED_SECONDS", 0.3)):
        monkeypatch.setattr(fetch_rollouts, name, seconds)
    try:
        ray.get(actors[0].__ray_ready__.remote(), timeout=60)
        ray.get(actors[1].__ray_ready__.remote(), timeout=60)
        assert [node_reach.node_of(actor) for actor in actors] == [here, here]
        there = list(rollouts)
        gone = [Locator(LOST, locator.group, locator.index) for locator in there]
        found, report = RolloutFetcher().fetch([*there, *gone], 3600.0)
    finally:
        for actor in actors:
            ray.kill(actor)
    assert set(found) == set(there)
    assert {rollout.locator for rollout in report.missing} == set(gone)
    assert {rollout.cause for rollout in report.missing} == {f"worker {LOST}: its node cannot be reached"}
