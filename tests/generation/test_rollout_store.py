"""The worker's memory of rollouts, and the numbers that leave it."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from pods_cluster.generation import reporter as reporter_module
from pods_cluster.generation import rollout_store as store_module
from pods_cluster.generation.engine_thread import LONG_WINDOWS, RateMeter
from pods_cluster.generation.messages import GeneratorError, GroupRequest
from pods_cluster.generation.reporter import Reporter, build_shard
from pods_cluster.generation.rollout_store import RolloutStore
from pods_cluster.group_shard import GroupShard
from pods_cluster.types import FinishReason, GroupId, Prompt, Rollout, SamplingParams

GROUP = GroupId(0, 3)
PROMPT = Prompt(0, 3, "1+1=", (4, 5, 6))


def expected(*indices: int, size: int = 4, group: GroupId = GROUP) -> GroupRequest:
    return GroupRequest(group, PROMPT, indices, size, SamplingParams())


def rollout(index: int, reward: float | None = 1.0, group: GroupId = GROUP, tokens: int = 3) -> Rollout:
    reason = FinishReason.STOP if reward is not None else FinishReason.ABORT
    parts = {"answer": reward} if reward is not None else {}
    return Rollout(group, index, PROMPT.token_ids, [7] * tokens, None, reason, 1, 2, reward=reward, reward_parts=parts)


def test_rollouts_are_held_until_taken() -> None:
    store = RolloutStore()
    store.expect([expected(0, 1, 2, 3)])
    assert store.finish(rollout(2)) == 4
    assert store.finish(rollout(0)) == 4
    assert (store.stored, store.stored_tokens) == (2, 6)
    assert [item.index for item in store.sample(GROUP)] == [0, 2]
    taken, missing = store.take(GROUP, [2, 1])
    assert ([item.index for item in taken], missing) == ([2], [1])
    taken, missing = store.take(GROUP, [2, 0])
    assert ([item.index for item in taken], missing) == ([0], [2])
    assert store.groups() == [GROUP]
    assert store.finish(rollout(1)) == 4
    assert store.finish(rollout(3)) == 4
    store.take(GROUP, [1, 3])
    assert store.groups() == []
    assert store.stored == store.stored_tokens == 0
    assert store.take(GROUP, [1]) == ([], [1])


def test_a_place_in_the_engine_is_free_when_scoring_begins() -> None:
    store = RolloutStore()
    store.expect([expected(0, 1, 2, 3)])
    assert store.wait_for_room(4, 0.0) == 4
    assert store.wait_for_room(5, 60.0) == 4  # at once
    waiter = threading.Timer(0.0, lambda: store.begin_scoring(rollout(2)))
    waiter.start()
    assert store.wait_for_room(4, 60.0) == 3
    waiter.join()
    store.finish(rollout(2))
    assert store.wait_for_room(4, 60.0) == 3
    store.finish(rollout(3))  # not scored: nobody wants it
    assert store.wait_for_room(1, 0.0) == 2


def test_what_nobody_wants_leaves_no_trace() -> None:
    store = RolloutStore()
    store.expect([expected(0, 1, 2, 3)])
    store.finish(rollout(0))
    store.finish(rollout(1))
    assert sorted(store.keep(GROUP, [1, 2])) == ["0.3.0/3"]
    assert store.prompt(rollout(2)) == PROMPT
    assert store.prompt(rollout(3)) is None
    assert store.finish(rollout(3)) is None
    assert [item.index for item in store.sample(GROUP)] == [1]
    assert store.drop(GROUP) == ["0.3.0/2"]
    assert store.stored == 0
    assert store.groups() == []
    assert store.finish(rollout(2)) is None
    store.expect([expected(0, 1)])  # the same group may come again once all of it is gone
    assert store.keep(GroupId(9, 9), [1]) == []


def test_a_repeated_or_refused_request() -> None:
    store = RolloutStore()
    store.expect([expected(0, 1)])
    store.expect([expected(2, 3)])
    with pytest.raises(GeneratorError, match=r"0\.3\.0: rollouts \[1\] were submitted"):
        store.expect([expected(5, group=GroupId(0, 4)), expected(1, 4)])
    assert store.groups() == [GROUP]
    store.forget([expected(2, 3)])
    store.finish(rollout(0))
    store.finish(rollout(1))
    store.take(GROUP, [0, 1])
    assert store.groups() == []


def test_waiting_for_an_empty_store() -> None:
    store = RolloutStore()
    store.expect([expected(0)])
    assert not store.wait_empty(0.01)
    store.finish(rollout(0))
    taker = threading.Timer(0.05, lambda: store.take(GROUP, [0]))
    taker.start()
    assert store.wait_empty(10.0)
    taker.join()


def test_a_shard_holds_the_numbers() -> None:
    shard = build_shard("run/generator/0", 8, [rollout(5, 0.5, tokens=2), rollout(1, None, tokens=9)])
    assert (shard.group, shard.worker, shard.size, shard.prompt_tokens) == (GROUP, "run/generator/0", 8, 3)
    np.testing.assert_array_equal(shard.indices, [5, 1])
    np.testing.assert_array_equal(shard.rewards, [0.5, np.nan])
    np.testing.assert_array_equal(shard.parts["answer"], [0.5, np.nan])
    np.testing.assert_array_equal(shard.lengths, [2, 9])
    np.testing.assert_array_equal(shard.aborted, [False, True])
    np.testing.assert_array_equal(shard.truncated, [False, False])
    np.testing.assert_array_equal(shard.first_versions, [1, 1])
    np.testing.assert_array_equal(shard.last_versions, [2, 2])


def test_a_group_is_reported_when_its_rollouts_are_here_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "HOLD_SECONDS", 60.0)
    messages: queue.SimpleQueue[list[GroupShard]] = queue.SimpleQueue()
    reporter = Reporter("w", messages.put, lambda error: None)
    store = RolloutStore()
    store.expect([expected(0, 1, 2)])
    other = GroupId(0, 4)
    for index in (0, 2):
        store.finish(rollout(index))
        assert store.expects(GROUP)
        reporter.add(rollout(index), 4, more=True)
    reporter.add(rollout(0, group=other), 1)
    assert [shard.group for shard in messages.get(timeout=30)] == [other]
    store.finish(rollout(1))
    assert not store.expects(GROUP)
    reporter.add(rollout(1), 4, more=False)
    (shard,) = messages.get(timeout=30)
    assert sorted(shard.indices.tolist()) == [0, 1, 2]
    reporter.add(rollout(3), 4, more=True)
    monkeypatch.setattr(reporter_module, "HOLD_SECONDS", 0.0)
    reporter.add(rollout(1, group=other), 2, more=True)
    groups = {shard.group for shard in messages.get(timeout=30)}
    reporter.close()  # what is left is sent
    while not messages.empty():
        groups |= {shard.group for shard in messages.get()}
    assert groups == {GROUP, other}


def test_many_rollouts_travel_in_few_messages_and_none_is_lost() -> None:
    messages: list[list[GroupShard]] = []
    failures: list[BaseException] = []
    reporter = Reporter("w", messages.append, failures.append)
    for number in range(6400):
        reporter.add(rollout(number % 64, group=GroupId(0, number // 64)), 64)
    reporter.close()
    seen = [(shard.group, int(index)) for shards in messages for shard in shards for index in shard.indices]
    assert sorted(seen) == sorted((GroupId(0, row), index) for row in range(100) for index in range(64))
    assert reporter.reported == 6400
    assert len(messages) < 640
    assert not failures


def test_a_report_that_fails_is_told() -> None:
    failures: list[BaseException] = []

    def send(shards: list[GroupShard]) -> None:
        raise OSError("no route")

    reporter = Reporter("w", send, failures.append)
    reporter.add(rollout(0), 4)
    deadline = time.monotonic() + 10
    while not failures and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(failures[0], OSError)


def test_rates_leave_pauses_out_of_the_saturated_one() -> None:
    now = [0.0]
    meter = RateMeter(window=1.0, clock=lambda: now[0])
    busy, tokens = 0.0, 0
    for _ in range(4 * LONG_WINDOWS + 4):  # bursts of 0.25 s at 1,000 tokens/s, each followed by 0.75 s of rest
        now[0] += 1.0
        busy += 0.25
        tokens += 250
        meter.update(tokens, busy)
    assert meter.saturated == pytest.approx(1000.0)
    assert meter.now == pytest.approx(250.0)
    now[0] += 10.0
    assert meter.now == 0.0
    for _ in range(20):  # a straggler at 10 tokens/s is busy, and far from saturated
        now[0] += 1.0
        busy += 1.0
        tokens += 10
        meter.update(tokens, busy)
    assert meter.saturated == pytest.approx(1000.0)
    assert meter.now == pytest.approx(10.0)


def test_a_rate_that_was_not_kept_up_is_not_the_saturated_one() -> None:
    meter = RateMeter(window=1.0, clock=lambda: 0.0)
    tokens = 0
    for second in range(1, 4 * LONG_WINDOWS + 1):  # a batch begins fast every fourth second
        tokens += 4000 if second % 4 == 1 else 1000
        meter.update(tokens, float(second))
        if second == 1:
            assert meter.saturated == 4000.0
    assert meter.saturated == pytest.approx(1750.0)


def test_the_seconds_with_something_pending_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now)
    store, other = RolloutStore(), GroupId(0, 4)
    assert store.occupied_seconds == 0.0
    store.expect([expected(0, 1)])
    now = 102.0
    store.expect([expected(0, group=other)])  # beside the others, not on top of them
    store.finish(rollout(0))
    now = 105.0
    assert store.occupied_seconds == 5.0
    store.finish(rollout(1))
    store.finish(rollout(0, group=other))
    now = 200.0
    assert store.occupied_seconds == 5.0, "held ones are not pending"
    store.expect([expected(2, 3)])
    now = 201.0
    store.forget([expected(2, 3)])
    now = 300.0
    assert store.occupied_seconds == 6.0
    store.finish(rollout(2))  # of requests that were refused
    assert store.occupied_seconds == 6.0


def test_seconds_in_which_only_scorers_work_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now)
    store = RolloutStore()
    store.expect([expected(0, 1, 2)])
    store.begin_scoring(rollout(0))
    now = 103.0
    assert store.only_scoring_seconds == 0.0, "the engine still has two"
    store.begin_scoring(rollout(1))
    store.finish(rollout(2))  # given up: the engine ends it unscored
    now = 105.0
    assert store.only_scoring_seconds == 2.0
    store.finish(rollout(0))
    now = 106.0
    store.expect([expected(3)])
    now = 110.0
    assert store.only_scoring_seconds == 3.0
    store.begin_scoring(rollout(3))
    store.begin_scoring(rollout(3))
    store.finish(rollout(1))
    store.finish(rollout(3))
    store.begin_scoring(rollout(3))  # late: it is not pending any more
    now = 200.0
    assert store.only_scoring_seconds == 3.0
    assert store.occupied_seconds == 10.0
