"""Prompts are shared out over engines of different speed, with workers that only note what they are sent."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import pytest

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.members import Member
from pods_cluster.generation.messages import GroupRequest, Portion, WorkerInfo
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.types import GroupId, Prompt
from tests.run.parts import loop_config

N = 8


class Worker:
    """Handle of a worker; `sent` are the requests that it got."""

    def __init__(self) -> None:
        self.sent: list[GroupRequest] = []
        self.submit = self

    async def remote(self, requests: list[GroupRequest]) -> None:
        self.sent += requests

    @property
    def rollouts(self) -> int:
        return sum(len(request.indices) for request in self.sent)


def pool_of(*overrides: str, **rates: float) -> tuple[GeneratorPool, dict[str, Worker]]:
    """A pool whose workers have kept up these rates, each on a node of its own kind."""
    pool = GeneratorPool(loop_config(f"generator.rollouts_per_prompt={N}", *overrides), None)
    workers = {name: Worker() for name in rates}
    for name, rate in rates.items():
        info = WorkerInfo(name, name, 0, "paced", 0, kind=f"card {name}")
        pool._members[name] = Member(cast(Any, workers[name]), info, rate=rate)
    return pool, workers


def portions(count: int) -> list[Portion]:
    return [Portion(GroupId(0, row), Prompt(0, row, "a", (1,)), N, 0, N, 100.0) for row in range(count)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_card_of_three_times_the_speed_gets_three_times_the_rollouts(staleness: int) -> None:
    pool, workers = pool_of(f"staleness={staleness}", fast=3000.0, slow=1000.0)
    asyncio.run(pool.submit(portions(12)))
    assert workers["fast"].rollouts == pytest.approx(72, abs=N)
    assert workers["fast"].rollouts + workers["slow"].rollouts == 12 * N


def test_a_fast_engine_that_is_full_gets_no_more_than_it_has_places_for() -> None:
    pool, workers = pool_of("staleness=1", "generator.max_sequences=16", fast=3000.0, slow=1000.0)
    pool._members["fast"].sampling = 18
    pool._members["slow"].sampling = 10
    asyncio.run(pool.submit(portions(1)))
    assert (workers["fast"].rollouts, workers["slow"].rollouts) == (0, N)


def test_before_anything_is_measured_all_get_the_same() -> None:
    pool, workers = pool_of("staleness=0", one=0.0, other=0.0)
    asyncio.run(pool.submit(portions(6)))
    assert workers["one"].rollouts == workers["other"].rollouts == 3 * N


@pytest.mark.parametrize(
    ("labels", "given", "told"),
    [
        ({"card": "slow"}, {"card": {"fast": 4000, "slow": 1000}}, ""),
        ({"card": "old"}, {"card": {"fast": 4000}}, "this node has card=old"),
        ({}, {"card": {"fast": 4000}}, "this node has no label card"),
        ({"card": "fast"}, {"fast": 4000}, "a number, or {LABEL: {VALUE: number"),
    ],
)
def test_a_paced_engine_has_the_speed_of_its_kind_of_node(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], given: dict[str, Any], told: str
) -> None:
    from pods_cluster.generation.engines import factory

    monkeypatch.setattr(factory, "node_labels", lambda: labels)
    if not told:
        assert factory._rate_of_this_node(given) == 1000
        return
    with pytest.raises(EngineError, match=re.escape(told)):
        factory._rate_of_this_node(given)
