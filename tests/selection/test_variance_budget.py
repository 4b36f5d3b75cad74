"""A step's budget goes where variance is: bounds, sum and order of the shares; and the selector keeps what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import ConfigError
from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.selection.variance_budget import LEAST, allocate
from pods_cluster.types import GroupId
from tests.law import law
from tests.selection.policies import policy, run_config

groups = st.lists(st.tuples(st.floats(0, 10) | st.just(0.0), st.integers(2, 64)), min_size=1, max_size=12)


@law(60)
@given(groups, st.integers(0, 400))
def test_the_shares_keep_their_bounds_their_sum_and_their_order(found: list[tuple[float, int]], budget: int) -> None:
    spreads, sizes = [spread for spread, _ in found], [size for _, size in found]
    kept = allocate(spreads, sizes, budget)
    assert (kept >= LEAST).all()
    assert (kept <= sizes).all()
    assert kept.sum() == min(max(budget, LEAST * len(found)), sum(sizes))
    for i, (spread, size) in enumerate(found):
        for j, (other, others) in enumerate(found):
            if spread > other and size >= others:
                assert kept[i] >= kept[j]
    assert kept.tolist() == allocate(spreads, sizes, budget).tolist()


def test_known_shares() -> None:
    assert allocate([1e-12, 2e-12, 1.0], [8, 8, 2], 7).tolist() == [2, 3, 2]  # of two that are nothing the larger first
    assert allocate([1.0, 1.0, 1.0], [64] * 3, 24).tolist() == [8, 8, 8]
    assert allocate([3.0, 1.0], [64, 64], 16).tolist() == [12, 4]
    assert allocate([3.0, 1.0], [9, 64], 16).tolist() == [9, 7]  # the first has no more
    assert allocate([1.0, 0.0, 0.0], [64] * 3, 24).tolist() == [20, 2, 2]
    assert allocate([0.0, 0.0], [64, 64], 9).tolist() == [5, 4]
    assert allocate([1.0], [2], 16).tolist() == [2]
    assert allocate([], [], 0).tolist() == []  # a poll that finds no group, or a step whose groups all had no signal


def shard(row: int, rewards: list[float]) -> GroupShard:
    n = len(rewards)
    zeros = np.zeros(n, np.int32)
    return GroupShard(
        group=GroupId(0, row),
        worker="w",
        size=n,
        prompt_tokens=3,
        indices=np.arange(n, dtype=np.int32),
        rewards=np.array(rewards),
        lengths=np.full(n, 5, np.int32),
        first_versions=zeros,
        last_versions=zeros,
        truncated=np.zeros(n, bool),
        aborted=np.zeros(n, bool),
    )


def test_the_selector_keeps_more_of_the_group_that_spreads_more() -> None:
    even, rare = [0.0, 1.0] * 8, [1.0] + [0.0] * 15
    for budget, wanted in (("group", [4, 4]), ("step", [5, 3])):
        core = SelectorCore(policy(keep=4, budget=budget))
        for row, rewards in enumerate((even, rare)):
            core.expect(GroupId(0, row), 16)
            core.add(shard(row, rewards))
        decision = core.collect(2, 0, 0)
        assert [len(selection) for selection in decision.selections] == wanted
        assert [stats.n_kept for stats in decision.stats] == wanted
        assert [selection.group_std > 0 for selection in decision.selections] == [True, True]
        assert 1.0 in decision.selections[1].rewards


def test_settling_cannot_know_how_many_are_kept() -> None:
    with pytest.raises(ConfigError, match=r"selector\.settle: abort .* selector\.budget: step .* use budget: group"):
        run_config(budget="step", settle="abort")
