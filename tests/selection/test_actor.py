"""The selector actor on a real Ray: polling, losses, errors that surface, and a poll that is taken over."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pods_cluster.config import ConfigError
from pods_cluster.selection.actor import SelectorActor, start_selector
from pods_cluster.types import Fate, GroupId
from tests.selection.policies import run_config
from tests.selection.shards import shard

ray = pytest.importorskip("ray")

A, B, C = GroupId(0, 1), GroupId(0, 2), GroupId(0, 3)
MIXED = [1.0, 0.0, 1.0, 0.0]
DEADLINE = 60


@pytest.fixture
def start(cluster: None) -> Iterator[Any]:
    actors = []

    def begin(**settings: Any) -> Any:
        name = f"test-selection-{os.getpid()}-{len(actors)}-{time.monotonic_ns()}"
        actors.append(start_selector(name, run_config(**settings)))
        return actors[-1]

    yield begin
    for actor in actors:
        ray.kill(actor)


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=DEADLINE)


def test_a_poll_waits_for_the_groups_it_wants(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4)]))
    poll = actor.collect.remote(2, 0, DEADLINE)
    actor.report.remote([shard(B, MIXED, worker="w1")])
    assert ray.wait([poll], timeout=0.3)[0] == []
    actor.report.remote([shard(A, MIXED[:2], size=4, worker="w0"), shard(A, MIXED[2:], size=4, indices=[2, 3])])
    decision = get(poll)
    assert [selection.group for selection in decision.selections] == [A, B]
    assert not decision.timed_out
    assert decision.selections[1].locators[0].worker == "w1"
    assert get(actor.stats.remote())["fates"] == {"trained": 2}


def test_a_poll_returns_as_soon_as_a_fate_is_known(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4)]))
    poll = actor.collect.remote(2, 0, DEADLINE)
    actor.report.remote([shard(A, [1.0] * 4)])
    decision = get(poll)
    assert [(fate.group, fate.fate) for fate in decision.fates] == [(A, Fate.NO_SIGNAL)]
    assert decision.selections == []
    assert decision.incomplete == 1


def test_a_poll_ends_at_its_deadline_with_what_is_there(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4)]))
    get(actor.report.remote([shard(A, MIXED)]))
    held = get(actor.collect.remote(2, 0, 0.05, partial=False))
    assert held.timed_out
    assert (held.selections, held.ready) == ([], 1)
    decision = get(actor.collect.remote(2, 0, 0.05))
    assert decision.timed_out
    assert [selection.group for selection in decision.selections] == [A]


def test_a_straggler_is_waited_for_before_younger_groups_are_taken(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4), (C, 4)]))
    get(actor.report.remote([shard(B, MIXED), shard(C, MIXED)]))
    poll = actor.collect.remote(2, 0, DEADLINE, straggler_s=30.0)
    assert ray.wait([poll], timeout=0.3)[0] == []
    actor.report.remote([shard(A, MIXED)])
    assert [selection.group for selection in get(poll).selections] == [A, B]
    get(actor.expect.remote([(GroupId(1, 1), 4), (GroupId(1, 2), 4)]))
    get(actor.report.remote([shard(GroupId(1, 2), MIXED)]))
    late = get(actor.collect.remote(2, 0, DEADLINE, straggler_s=0.2))  # (1, 1) never comes
    assert [selection.group for selection in late.selections] == [C, GroupId(1, 2)]


def test_losses_and_cancellations_reach_the_groups(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4)]))
    get(actor.report.remote([shard(A, MIXED, worker="w0"), shard(B, MIXED[:1], size=4)]))
    assert get(actor.mark_lost.remote("w0")) == 4
    assert get(actor.collect.remote(1, 0, DEADLINE)).fates[0].fate is Fate.LOST
    (cancelled,) = get(actor.cancel.remote([A, B]))
    assert (cancelled.group, cancelled.fate, cancelled.stats.n_finished) == (B, Fate.CANCELLED, 1)
    get(actor.report.remote([shard(B, MIXED[:1], size=4)]))
    stats = get(actor.stats.remote())
    assert stats["fates"] == {"lost": 1, "cancelled": 1}
    assert stats["ignored"] == {"unknown_group_rollouts": 1}
    assert stats["expected"] == 0


def test_staleness_is_judged_at_the_learners_version() -> None:
    async def run() -> Any:
        actor = SelectorActor(run_config(staleness=1))
        await actor.expect([(A, 4), (B, 4)])
        await actor.report([shard(A, MIXED, version=2), shard(B, MIXED, version=3)])
        return await actor.collect(1, 4, DEADLINE)

    decision = asyncio.run(run())
    assert [fate.fate for fate in decision.fates] == [Fate.STALE]
    assert [selection.group for selection in decision.selections] == [B]


def test_a_bad_report_surfaces_in_the_next_poll_and_the_rest_of_it_is_kept(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4), (B, 4)]))
    poll = actor.collect.remote(1, 0, DEADLINE)
    actor.report.remote([shard(A, MIXED, size=5, worker="w7"), shard(B, MIXED)])
    with pytest.raises(RuntimeError, match=r"report to the selector failed.*0\.1\.0.*w7.*size: 5"):
        get(poll)
    assert [selection.group for selection in get(actor.collect.remote(1, 0, DEADLINE)).selections] == [B]


def test_a_failing_rule_surfaces_in_the_poll(start: Any) -> None:
    actor = start(rule="builtins:max")
    get(actor.expect.remote([(A, 4)]))
    actor.report.remote([shard(A, MIXED)])
    with pytest.raises(RuntimeError, match=r"selector\.rule: 'builtins:max' failed on group 0\.1\.0"):
        get(actor.collect.remote(1, 0, DEADLINE))


def test_a_later_poll_takes_over_and_loses_nothing(start: Any) -> None:
    actor = start()
    get(actor.expect.remote([(A, 4)]))
    orphan = actor.collect.remote(1, 0, DEADLINE)
    ray.wait([orphan], timeout=0.2)
    poll = actor.collect.remote(1, 0, DEADLINE)
    assert get(orphan).superseded
    actor.report.remote([shard(A, MIXED)])
    assert len(get(poll).selections) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"keep": 5}, r"selector\.keep: 5"),
        ({"keep": 0}, r"selector\.keep: 0"),
        ({"min_valid": 9}, r"selector\.min_valid: 9"),
        ({"no_signal": "ignore"}, r"selector\.no_signal: 'ignore'"),
        ({"staleness": -1}, "staleness: -1"),
        ({"rule": "max_varianc"}, r"selector\.rule: 'max_varianc'.*max_variance"),
        ({"options": {"beta": 1}}, r"selector\.options: .*beta"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SelectorActor(run_config(**settings))


def test_a_poll_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="want: 0"):
        asyncio.run(SelectorActor(run_config(rule="random")).collect(0, 0, 1.0))
