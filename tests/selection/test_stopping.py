"""Groups that are stopped early: what the selector tells the generators, when, and what their numbers say afterwards."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.selection import actor as actor_module
from pods_cluster.selection.actor import SelectorActor
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.types import Fate, GroupId
from tests.law import law
from tests.selection.policies import policy, run_config
from tests.selection.shards import shard

A, B = GroupId(0, 1), GroupId(0, 2)


def core(settle: str, keep: int = 4, **selector) -> SelectorCore:
    return SelectorCore(policy(keep, settle=settle, **selector))


def test_a_settled_group_is_aborted_once_and_selected_when_the_rest_came_back() -> None:
    selector = core("abort")
    assert selector.expect(A, 8) == 8
    selector.add(shard(A, [1.0, 1.0, 0.0], indices=[3, 1, 6], size=8, lengths=[4, 5, 6]))
    assert not selector.instructions()
    selector.add(shard(A, [0.0], indices=[2], size=8, lengths=9))
    assert selector.instructions().abort == [A]
    assert not selector.instructions()
    assert selector.collect(1, 0, 0).selections == []  # four are still on their way back
    # one finished before the abort reached it, one had not begun
    selector.add(shard(A, [1.0], indices=[0], size=8, lengths=6))
    selector.add(shard(A, [math.nan] * 3, indices=[4, 5, 7], size=8, lengths=[20, 10, 0], aborted=True))
    decision = selector.collect(1, 0, 0)
    (selection,), (stats,) = decision.selections, decision.stats
    assert selection.settled
    assert sorted(selection.rewards) == [0, 0, 1, 1]
    assert {locator.index for locator in selection.locators} <= {0, 1, 2, 3, 6}
    assert (stats.n_finished, stats.n_aborted, stats.n_valid) == (8, 3, 5)
    assert (stats.tokens, stats.aborted_tokens) == (60, 30)
    assert stats.length_mean == 6.0  # of the whole ones
    assert stats.tokens_saved == pytest.approx(3 * 60 / 5)


def test_what_an_abort_saved_is_read_off_groups_that_ended_by_themselves() -> None:
    selector = core("abort")
    for group in (A, B):
        selector.expect(group, 6)
    selector.add(shard(B, [1.0] * 6, size=6, lengths=[10, 20, 30, 40, 50, 60]))  # never settles
    selector.ready(0, 0)
    selector.add(shard(A, [1.0, 1.0, 0.0, 0.0], indices=range(4), size=6, lengths=10))
    selector.add(shard(A, [math.nan] * 2, indices=[4, 5], size=6, lengths=[25, 0], aborted=True))
    decision = selector.collect(1, 0, 0)
    # after 25 tokens one of 30, 40, 50 or 60 was to come; after none one of all six
    assert decision.stats[0].tokens_saved == pytest.approx((45 - 25) + 35)


def test_a_group_that_ends_before_it_settles_is_an_ordinary_one() -> None:
    selector = core("abort")
    selector.expect(A, 5)
    selector.add(shard(A, [1.0, 1.0, 0.0, 1.0], indices=[0, 1, 2, 3], size=5))
    selector.add(shard(A, [0.0], indices=[4], size=5))
    assert not selector.instructions()
    decision = selector.collect(1, 0, 0)
    assert not decision.selections[0].settled
    assert decision.stats[0].tokens_saved == 0


def test_waves_wait_for_a_portion_whole_and_stop_between_them() -> None:
    selector = core("waves", waves=3)
    assert selector.expect(A, 12) == 4
    selector.add(shard(A, [0.0, 0.0, 0.0], indices=[0, 1, 2], size=12, lengths=[2, 4, 6]))
    assert not selector.instructions()
    selector.add(shard(A, [0.0], indices=[3], size=12, lengths=8))
    (wave,) = selector.instructions().waves
    assert wave == (A, 4, 8, 5.0)
    selector.add(shard(A, [1.0, 1.0, 1.0, 1.0], indices=[4, 5, 6, 7], size=12, lengths=5))
    assert not selector.instructions()
    decision = selector.collect(1, 0, 0)
    (selection,), (stats,) = decision.selections, decision.stats
    assert selection.settled
    assert sorted(selection.rewards) == [0, 0, 1, 1]
    assert (stats.n_unissued, stats.n_lost, stats.n_pending, stats.n_finished) == (4, 0, 0, 8)
    assert stats.tokens_saved == 4 * 5.0
    assert (stats.first_valid, stats.first_mean) == (4, 0.0)  # stopping has no part in the first portion
    assert stats.reward_mean == 0.5


def test_a_group_without_signal_uses_all_its_waves() -> None:
    selector = core("waves", waves=3)
    selector.expect(A, 12)
    start = 0
    for stop in (4, 8, 12):
        selector.add(shard(A, [1.0] * (stop - start), indices=range(start, stop), size=12))
        assert [wave[1:3] for wave in selector.instructions().waves] == ([(stop, stop + 4)] if stop < 12 else [])
        start = stop
    assert selector.collect(1, 0, 0).fates[0].fate is Fate.NO_SIGNAL


def test_rollouts_too_old_for_the_step_do_not_settle_a_group() -> None:
    selector = core("waves", waves=2)
    selector.expect(A, 8)
    selector.ready(5, 0)
    selector.add(shard(A, [1.0, 1.0, 0.0, 0.0], indices=range(4), size=8, version=[5, 5, 5, 4]))
    assert selector.instructions().waves[0][1:3] == (4, 8)


def test_losses_bring_the_next_portion_and_a_cancelled_group_no_orders() -> None:
    selector = core("waves", waves=2)
    selector.expect(A, 8)
    selector.expect(B, 8)
    selector.add(shard(A, [1.0, 1.0], indices=[0, 1], size=8, worker="w0"))
    selector.add(shard(A, [0.0], indices=[2], size=8, worker="w1"))
    selector.add(shard(B, [1.0, 1.0, 1.0, 0.0], indices=range(4), size=8, worker="w1"))
    selector.add(shard(A, [], size=8, indices=[], lost=1))
    selector.cancel([B])
    (wave,) = selector.instructions().waves
    assert wave[:3] == (A, 4, 8)


def test_a_reward_outside_the_declared_range_is_told() -> None:
    selector = core("abort")
    selector.expect(A, 8)
    with pytest.raises(ValueError, match=r"reward: 1\.5 lies outside its declared range \[0\.0, 1\.0\]"):
        selector.add(shard(A, [1.5], indices=[0], size=8))


@law(100)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=12, max_size=12),
    st.sampled_from(["abort", "waves"]),
    st.permutations(range(12)),
    st.integers(2, 6),
)
def test_a_stopped_group_loses_no_variance(rewards: list[float], mode: str, order: list[int], m: int) -> None:
    """Law: what is kept has the variance that all n rollouts would have given."""
    whole = SelectorCore(policy(m, no_signal="keep"))
    whole.expect(A, 12)
    whole.add(shard(A, rewards))
    selector = core(mode, m, no_signal="keep", waves=3)
    issued = selector.expect(A, 12)
    done: set[int] = set()
    stopped = False
    while left := [index for index in order if index < issued and index not in done]:
        index = left[0]
        done.add(index)
        aborted = {"aborted": True} if stopped else {}
        selector.add(shard(A, [math.nan if stopped else rewards[index]], indices=[index], size=12, **aborted))
        instructions = selector.instructions()
        stopped = stopped or bool(instructions.abort)
        issued = instructions.waves[0].stop if instructions.waves else issued
    (selection,) = selector.collect(1, 0, 0).selections
    assert np.var(selection.rewards) == pytest.approx(np.var(whole.collect(1, 0, 0).selections[0].rewards))


def test_the_actor_answers_with_instructions_as_soon_as_there_are_any() -> None:
    async def run() -> None:
        actor = SelectorActor(run_config(4, 8, settle="waves", waves=2))
        assert await actor.expect([(A, 8), (B, 8)]) == [4, 4]
        assert not await actor.instructions(0.01)
        waiting = asyncio.ensure_future(actor.instructions(60.0))
        await asyncio.sleep(0)
        await actor.report([shard(A, [1.0] * 4, indices=range(4), size=8)])
        assert [wave.group for wave in (await asyncio.wait_for(waiting, 5)).waves] == [A]

    asyncio.run(run())


def test_the_deadline_for_stragglers_counts_from_when_a_step_could_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls are short; it is the first of them that finds enough groups that starts the clock, which is put forward here."""
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr(actor_module, "time", clock)

    async def run() -> None:
        nonlocal ahead
        actor = SelectorActor(run_config(staleness=1))
        C = GroupId(0, 3)
        await actor.expect([(A, 4), (B, 4), (C, 4)])
        await actor.report([shard(C, [1.0, 0.0, 1.0, 0.0])])
        # not full: what is there is younger than two groups that are missing, and stays
        assert (await actor.collect(2, 0, 0.02, straggler_s=60.0)).selections == []
        ahead += 60.0
        await actor.report([shard(B, [1.0, 0.0, 1.0, 0.0])])
        held = await actor.collect(2, 0, 0.02, straggler_s=60.0)
        assert [selection.group for selection in held.selections] == [B]  # among the two oldest
        assert held.overtaken == 1
        assert (await actor.collect(1, 0, 0.02, straggler_s=60.0)).selections == []
        ahead += 59.9
        late = await actor.collect(1, 0, 60.0, straggler_s=60.0)
        assert [selection.group for selection in late.selections] == [C]
        assert late.overtaken == 1

    asyncio.run(run())
