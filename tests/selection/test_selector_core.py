"""The selector's core: completeness, fates, staleness, and that nothing is lost or counted twice."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.selection.decision_packing import pack_selections, unpack_selections
from pods_cluster.selection.rule_registry import RuleError, register_rule
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.types import Fate, GroupId, Locator
from tests.law import law
from tests.selection.policies import core, expecting, only_fate, policy
from tests.selection.shards import shard

ACTIONS = ["report", "report", "report", "repeat", "lost", "die", "cancel", "collect", "learn"]
A, B, C = GroupId(0, 1), GroupId(0, 2), GroupId(0, 3)
MIXED = [1.0, 0.0, 1.0, 0.0]


def test_cut_rollouts_count_nothing_in_the_loss_where_they_are_masked() -> None:
    for masked, expected in ((True, [1.0, 0.0]), (False, None)):
        selector = SelectorCore(replace(policy(2), mask_truncated=masked))
        selector.expect(A, 4)
        selector.add(shard(A, MIXED, truncated=[False, False, True, False]))
        (selection,) = selector.collect(1, 0, 0).selections
        assert [locator.index for locator in selection.locators] == [1, 2], "they are selected as before"
        assert (None if selection.weights is None else selection.weights.tolist()) == expected
        assert selection.rewards.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("together", [True, False])
def test_tokens_of_environments_travel_with_the_kept_rollouts(together: bool) -> None:
    selector, written = expecting(A), [3, 0, 8, 1]
    if together:
        shards = [shard(A, MIXED, environment=written)]
    else:
        shards = [shard(A, MIXED[:2], indices=[0, 1], size=4, worker="w0"),
                  shard(A, MIXED[2:], indices=[2, 3], size=4, worker="w1", environment=written[2:])]  # fmt: skip
    for each in shards:
        selector.add(pickle.loads(pickle.dumps(each)))
    packed = pickle.loads(pickle.dumps(pack_selections(selector.collect(1, 0, 0).selections)))
    (selection,) = unpack_selections(packed)
    assert selection.environment_tokens is not None
    expected = written if together else [0, 0, *written[2:]]
    assert selection.environment_tokens.tolist() == [expected[locator.index] for locator in selection.locators]
    assert selection.lengths.tolist() == [10, 10]


def test_a_group_is_selected_once_its_shards_account_for_all_of_it() -> None:
    selector = expecting(A)
    selector.add(shard(A, [1.0, 0.0], indices=[2, 0], size=4, worker="w0", lengths=[5, 6]))
    assert selector.ready(0, 0) == (0, 0)
    assert selector.collect(1, 0, 0).incomplete == 1
    selector.add(shard(A, [0.5, 0.4], indices=[3, 1], size=4, worker="w1"))
    decision = selector.collect(1, 0, 0)
    (selection,) = decision.selections
    assert selection.locators == [Locator("w0", A, 0), Locator("w0", A, 2)]
    assert selection.rewards.tolist() == [0.0, 1.0]
    assert selection.lengths.tolist() == [6, 5]
    assert selection.prompt_tokens == 7
    assert (selection.group_mean, selection.group_valid) == (pytest.approx(0.475), 4)
    assert selection.group_std == pytest.approx(np.std([0, 0.4, 1, 0.5], ddof=1))
    assert decision.incomplete == 0


def test_oldest_groups_go_first_and_a_step_takes_no_more_than_wanted() -> None:
    selector = expecting(A, B, C)
    for group in (C, A, B):
        selector.add(shard(group, MIXED))
    decision = selector.collect(2, 0, 0)
    assert [selection.group for selection in decision.selections] == [A, B]
    assert decision.ready == 1
    assert [selection.group for selection in selector.collect(2, 0, 0).selections] == [C]


def test_order_of_issue_may_be_given() -> None:
    selector = core()
    selector.expect(A, 4, order=9)
    selector.expect(B, 4, order=3)
    selector.expect(C, 4)
    for group in (A, B, C):
        selector.add(shard(group, MIXED))
    assert [selection.group for selection in selector.collect(3, 0, 0).selections] == [B, A, C]


def test_all_or_none_and_the_oldest_only() -> None:
    selector = expecting(A, B, C)
    selector.add(shard(B, MIXED))
    assert selector.collect(2, 0, 0, partial=False).selections == []
    selector.add(shard(C, MIXED))
    # A is a straggler: of the two oldest groups only B is ready
    selector.ready(0, 0)
    assert selector.oldest_ready(2) == 1
    assert selector.collect(2, 0, 0, partial=False, oldest_only=True).selections == []
    assert [s.group for s in selector.collect(2, 0, 0, oldest_only=True).selections] == [B]
    selector.add(shard(A, MIXED))
    assert [s.group for s in selector.collect(2, 0, 0, partial=False, oldest_only=True).selections] == [A, C]


@pytest.mark.parametrize("no_signal", ["replace", "drop"])
def test_a_group_without_signal_is_reported(no_signal) -> None:
    selector = expecting(A, no_signal=no_signal)
    selector.add(shard(A, [1.0] * 4, parts={"correct": [1.0] * 4}))
    decision = selector.collect(1, 0, 0)
    assert [(fate.group, fate.fate) for fate in decision.fates] == [(A, Fate.NO_SIGNAL)]
    assert decision.fates[0].stats.no_signal
    assert decision.fates[0].stats.reward_mean == 1.0
    assert selector.fate_counts == {Fate.NO_SIGNAL: 1}


def test_a_group_without_signal_is_trained_under_keep() -> None:
    selector = expecting(A, no_signal="keep")
    selector.add(shard(A, [1.0] * 4))
    decision = selector.collect(1, 0, 0)
    assert len(decision.selections[0]) == 2
    assert decision.stats[0].no_signal
    assert decision.fates == []


def test_too_few_valid_rewards_and_the_floor() -> None:
    rewards = [1.0, math.nan, math.inf, 0.0]
    selector = expecting(A, keep=3)
    selector.add(shard(A, rewards))
    assert only_fate(selector) is Fate.TOO_FEW_VALID
    selector = expecting(A, keep=3, min_valid=2)
    selector.add(shard(A, rewards))
    decision = selector.collect(1, 0, 0)
    assert [locator.index for locator in decision.selections[0].locators] == [0, 3]
    stats = decision.stats[0]
    assert (stats.n_valid, stats.n_nan, stats.n_infinite, stats.n_excluded, stats.n_kept) == (2, 1, 1, 2, 2)


def test_an_aborted_rollout_is_not_trained() -> None:
    selector = expecting(A)
    selector.add(shard(A, MIXED, aborted=[True, False, False, False]))
    decision = selector.collect(1, 0, 0)
    assert 0 not in [locator.index for locator in decision.selections[0].locators]
    assert decision.stats[0].n_aborted == 1


def test_stale_rollouts_are_left_out_and_the_selection_is_made_again() -> None:
    selector = expecting(A)
    selector.add(shard(A, [0.0, 1.0, 0.4, 0.6], version=[3, 4, 5, 6], lengths=[90, 20, 30, 40]))
    assert selector.ready(4, 1) == (1, 0)  # evaluated once, at an earlier version
    decision = selector.collect(1, 6, 1)
    selection = decision.selections[0]
    assert [locator.index for locator in selection.locators] == [2, 3]
    assert selection.group_valid == 2
    assert selection.group_mean == pytest.approx(0.5)
    stats = decision.stats[0]
    assert (stats.n_stale, stats.n_valid, stats.oldest_version, stats.kept_oldest_version) == (2, 2, 3, 5)
    assert stats.stale_length_mean == 55.0
    assert stats.reward_mean == pytest.approx(0.5)
    assert stats.reward_std == pytest.approx(np.std([0.0, 1.0, 0.4, 0.6], ddof=1))


@pytest.mark.parametrize(("staleness", "stale"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_staleness_bound_is_inclusive(staleness: int, stale: bool) -> None:
    selector = expecting(A)
    selector.add(shard(A, MIXED, version=5))
    decision = selector.collect(1, 7, staleness)
    assert [fate.fate for fate in decision.fates] == ([Fate.STALE] if stale else [])
    assert len(decision.selections) == (0 if stale else 1)


def test_a_signal_that_staleness_takes_away_is_no_signal() -> None:
    selector = expecting(A)
    selector.add(shard(A, [0.0, 0.0, 1.0, 1.0], version=[0, 0, 1, 1]))
    assert only_fate(selector, version=1) is Fate.NO_SIGNAL


def test_the_numbers_of_a_trained_group() -> None:
    selector = expecting(A)
    selector.add(
        shard(
            A,
            [1.0, 0.0, 0.5, math.nan],
            lengths=[10, 20, 30, 40],
            truncated=[False, False, False, True],
            parts={"correct": [1.0, 0.0, 0.5, math.nan], "format": [0.1, 0.1, 0.1, 0.5]},
        )
    )
    stats = selector.collect(1, 0, 0).stats[0]
    assert (stats.size, stats.n_finished, stats.n_valid, stats.n_nan, stats.n_kept) == (4, 4, 3, 1, 2)
    assert (stats.reward_mean, stats.reward_std) == (0.5, 0.5)
    assert (stats.reward_min, stats.reward_max) == (0.0, 1.0)
    assert (stats.kept_mean, stats.kept_std) == (0.5, pytest.approx(math.sqrt(0.5)))
    assert (stats.tokens, stats.length_mean, stats.length_min, stats.length_max) == (100, 25.0, 10, 40)
    assert (stats.n_terminated, stats.terminated_length_mean) == (3, 20.0)
    assert (stats.terminated_length_min, stats.terminated_length_max) == (10, 30)
    assert (stats.kept_tokens, stats.kept_length_mean, stats.kept_length_max) == (30, 15.0, 20)
    assert (stats.truncated_share, stats.kept_truncated_share) == (0.25, 0.0)
    assert stats.parts_mean == {"correct": 0.5, "format": pytest.approx(0.2)}
    assert stats.parts_count == {"correct": 3, "format": 4}
    assert stats.parts_squares == {"correct": pytest.approx(0.5), "format": pytest.approx(0.12)}
    assert stats.kept_parts_mean == {"correct": 0.5, "format": pytest.approx(0.1)}
    assert stats.prompt_tokens == 7


def test_a_rule_that_fails_fails_every_collect_and_loses_no_group() -> None:
    register_rule("test_broken_core", replace=True)(lambda rewards, m, rng, context: [0] * m)
    selector = expecting(A, rule="test_broken_core")
    selector.add(shard(A, MIXED))
    for _ in range(2):
        with pytest.raises(RuleError, match="test_broken_core"):
            selector.collect(1, 0, 0)
    assert selector.expected() == [A]


def test_kept_rollouts_do_not_depend_on_the_order_of_arrival() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, 32).astype(float)
    kept = set()
    for _ in range(5):
        selector = expecting(A, size=32, keep=8)
        for part in np.array_split(rng.permutation(32), 6):
            selector.add(shard(A, rewards[part], indices=part, size=32, worker=f"w{rng.integers(3)}"))
        kept.add(tuple(locator.index for locator in selector.collect(1, 0, 0).selections[0].locators))
    assert len(kept) == 1


@law(120)
@given(st.data())
def test_every_group_has_exactly_one_fate_whatever_happens(data: st.DataObject) -> None:
    """Random interleavings of reports, repeats, losses, cancellations and collects, then a drain."""
    draw = data.draw
    size, m = 4, draw(st.sampled_from([2, 3]))
    no_signal = draw(st.sampled_from(["replace", "drop", "keep"]))
    min_valid = draw(st.sampled_from([None, 2, m]))
    selector = core(m, no_signal=no_signal, min_valid=min_valid)
    staleness, version = draw(st.integers(0, 2)), 0
    groups = [GroupId(0, row) for row in range(draw(st.integers(1, 6)))]
    fates: Counter[GroupId] = Counter()
    kinds: Counter[Fate] = Counter()
    pending = {group: list(range(size)) for group in groups}
    dead: set[str] = set()

    def account(decision) -> None:
        for selection in decision.selections:
            fates[selection.group] += 1
            kinds[Fate.TRAINED] += 1
            assert (min_valid or m) <= len(selection) <= m
            assert len({locator.index for locator in selection.locators}) == len(selection)
            assert np.all(version - selection.first_versions <= staleness)
            assert np.all(np.isfinite(selection.rewards))
            assert not {locator.worker for locator in selection.locators} & dead
        for fate in decision.fates:
            fates[fate.group] += 1
            kinds[fate.fate] += 1
            numbers = fate.stats
            assert numbers.size == numbers.n_finished + numbers.n_lost + numbers.n_pending

    for group in groups:
        selector.expect(group, size)
    for _ in range(draw(st.integers(0, 25))):
        action = draw(st.sampled_from(ACTIONS))
        group = draw(st.sampled_from(groups))
        alive = [worker for worker in ("w0", "w1", "w2") if worker not in dead]
        if action in ("report", "lost", "repeat") and (pending[group] or action == "repeat"):
            if action == "repeat":
                indices, lost = draw(st.lists(st.integers(0, size - 1), max_size=3)), 0
                pending[group] = [index for index in pending[group] if index not in indices]
            else:
                count = draw(st.integers(1, len(pending[group])))
                taken, pending[group] = pending[group][:count], pending[group][count:]
                indices, lost = ([], count) if action == "lost" else (taken, 0)
            rewards = [draw(st.sampled_from([0.0, 1.0, math.nan, math.inf])) for _ in indices]
            worker = draw(st.sampled_from(alive))
            selector.add(shard(group, rewards, indices=indices, size=size, lost=lost, worker=worker, version=version))
        elif action == "die" and len(alive) > 1:
            worker = draw(st.sampled_from(alive))
            dead.add(worker)
            selector.mark_lost(worker)
        elif action == "cancel":
            for fate in selector.cancel([group]):
                fates[fate.group] += 1
                kinds[fate.fate] += 1
        elif action == "collect":
            partial, oldest = draw(st.booleans()), draw(st.booleans())
            account(selector.collect(draw(st.integers(1, 4)), version, staleness, partial=partial, oldest_only=oldest))
        elif action == "learn":
            version += 1
    for group in groups:  # whatever is still out is lost; then all that is left must come out
        if pending[group]:
            selector.add(shard(group, [], size=size, lost=len(pending[group])))
    account(selector.collect(len(groups), version, staleness))
    assert fates == dict.fromkeys(groups, 1)
    assert kinds == selector.fate_counts
    assert selector.expected() == []
    assert no_signal != "keep" or kinds[Fate.NO_SIGNAL] == 0
