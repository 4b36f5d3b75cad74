"""Reports to the selector's core that are lost, come twice, contradict themselves, or that nobody waits for."""

from __future__ import annotations

import math

import pytest

from pods_cluster.selection.group_assembler import ShardError
from pods_cluster.types import Fate, GroupId
from tests.selection.policies import expecting, only_fate
from tests.selection.shards import shard

A, B, C = GroupId(0, 1), GroupId(0, 2), GroupId(0, 3)
MIXED = [1.0, 0.0, 1.0, 0.0]


def test_a_dead_workers_rollouts_are_lost_and_the_group_is_selected_from_the_rest() -> None:
    selector = expecting(A)
    selector.add(shard(A, [1.0, 0.0], indices=[0, 1], size=4, worker="w0"))
    selector.add(shard(A, [0.2, 0.3], indices=[2, 3], size=4, worker="w1"))
    assert selector.ready(0, 0) == (1, 0)
    assert selector.mark_lost("w0") == 2
    assert selector.mark_lost("w0") == 0
    assert selector.mark_lost("unheard of") == 0
    decision = selector.collect(1, 0, 0)
    assert {locator.worker for locator in decision.selections[0].locators} == {"w1"}
    assert (decision.stats[0].n_lost, decision.stats[0].n_finished) == (2, 2)


def test_a_group_short_by_loss_is_lost_and_one_that_never_had_enough_is_too_few() -> None:
    selector = expecting(A, B)
    selector.add(shard(A, [1.0], indices=[0], size=4, lost=3))
    selector.add(shard(B, [1.0, math.nan, math.nan], indices=[0, 1, 2], size=4, lost=0))
    assert only_fate(selector) is Fate.LOST
    selector.add(shard(B, [math.nan], indices=[3], size=4, worker="w1"))
    selector.mark_lost("w1")
    assert only_fate(selector) is Fate.TOO_FEW_VALID


def test_a_group_lost_whole_is_lost() -> None:
    selector = expecting(A)
    selector.add(shard(A, [], size=4, lost=4))
    decision = selector.collect(1, 0, 0)
    assert decision.fates[0].fate is Fate.LOST
    assert decision.fates[0].stats.n_lost == 4


def test_a_lost_rollout_made_again_elsewhere_counts() -> None:
    selector = expecting(A, size=2)
    selector.add(shard(A, [1.0], indices=[0], size=2, worker="w0"))
    selector.mark_lost("w0")
    selector.add(shard(A, [1.0], indices=[0], size=2, worker="w1"))
    assert selector.ready(0, 0) == (0, 0)  # index 1 is still out
    selector.add(shard(A, [0.0], indices=[1], size=2, worker="w1"))
    assert len(selector.collect(1, 0, 0).selections[0]) == 2


def test_duplicates_are_ignored_and_counted_and_do_not_complete_a_group() -> None:
    selector = expecting(A)
    selector.add(shard(A, [1.0, 0.0], indices=[0, 1], size=4))
    selector.add(shard(A, [0.5, 0.5, 0.7], indices=[0, 1, 2], size=4, worker="w1"))
    selector.add(shard(A, [0.7, 0.7], indices=[2, 2], size=4))
    assert selector.ignored["duplicate_rollouts"] == 4
    assert selector.ready(0, 0) == (0, 0)
    selector.add(shard(A, [0.6, 0.6], indices=[3, 3], size=4))
    assert selector.ignored["duplicate_rollouts"] == 5
    assert selector.collect(1, 0, 0).selections[0].rewards.tolist() == [1.0, 0.0]


def test_shards_of_groups_nobody_waits_for_are_ignored_and_counted() -> None:
    selector = expecting(A)
    selector.add(shard(B, MIXED))
    (cancelled,) = selector.cancel([A, B])
    assert (cancelled.group, cancelled.fate, cancelled.stats.n_pending) == (A, Fate.CANCELLED, 4)
    selector.add(shard(A, MIXED))
    assert selector.ignored["unknown_group_rollouts"] == 8
    decision = selector.collect(1, 0, 0)
    assert (decision.selections, decision.fates) == ([], [])
    assert selector.cancel([A]) == []


def test_a_group_is_announced_once() -> None:
    selector = expecting(A)
    with pytest.raises(ValueError, match=r"0\.1\.0 is expected already"):
        selector.expect(A, 4)
    selector.cancel([A])
    with pytest.raises(ValueError, match="has had its fate"):
        selector.expect(A, 4)
    with pytest.raises(ValueError, match="size"):
        selector.expect(B, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 5}, "size: 5 is not the 4"),
        ({"indices": [0, 1, 2, 4]}, "indices"),
        ({"indices": [-1, 1, 2, 3]}, "indices"),
        ({"parts": {"format": [1.0]}}, "format: 1 entries for 4"),
        ({"lost": -1, "size": 4}, "lost: -1"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(change, words: str) -> None:
    selector = expecting(A)
    with pytest.raises(ShardError, match=words) as caught:
        selector.add(shard(A, MIXED, worker="run/generator/3", **change))
    assert "run/generator/3" in str(caught.value)
    assert "0.1.0" in str(caught.value)
