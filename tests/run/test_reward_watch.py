"""The watch on rewards: what is told while a step waits for them, and when waiting is given up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import Config
from pods_cluster.run.errors import RewardsFail
from pods_cluster.run.reward_watch import RewardWatch
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_stats import ScorerStats
from pods_cluster.scoring.scoring_totals import ScoringTotals
from tests.run.parts import loop_config

JUDGE = "reward=[{name: 'judge.py:judge', timeout: 5}]"


@dataclass
class Scene:
    """A run's scorers as its controller sees them, with a clock of its own."""

    config: Config = field(default_factory=lambda: loop_config(JUDGE, "scoring.patience=60"))
    now: float = 0.0
    valid: int = 0
    timeouts: int = 0
    pending: int = 256
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = ScoringTotals()
        self.watch = RewardWatch(cast(Any, self), self.config, lambda: self.now)

    def event(self, kind: str, text: str, *, level: str, **fields: Any) -> None:
        assert level == "warning"
        self.events.append((kind, text, fields))

    def update(self) -> None:
        failures = {"judge": {FailureKind.TIMEOUT: self.timeouts}} if self.timeouts else {}
        samples = {"judge": {FailureKind.TIMEOUT: ["no result within 5 s"]}} if self.timeouts else {}
        scored = self.valid + self.timeouts
        self.totals.update({"a": ScorerStats(scored, self.timeouts, 0, failures, {}, samples, pending=self.pending)})

    def look(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.update()
        self.watch.look(self.totals)

    def told(self, kind: str) -> list[str]:
        return [text for found, text, _ in self.events if found == kind]


def test_a_step_that_waits_for_rewards_alone_is_told_at_10_30_90_seconds() -> None:
    scene = Scene(loop_config(JUDGE, "scoring.patience=1000"))
    scene.watch.begin_step()
    for second in range(100):
        if second % 5 == 4:
            scene.timeouts, scene.pending = scene.timeouts + 1, scene.pending - 1
        scene.look()
    texts = scene.told("rewards_slow")
    assert [fields["seconds"] for kind, _, fields in scene.events if kind == "rewards_slow"] == [10.0, 30.0, 90.0]
    assert texts[0] == "the step waits for rewards since 10 s: 0 of 256 scored, judge timed out 2 times"
    scene.totals.generating = 3  # the engines work again: it does not wait for rewards alone
    for _ in range(400):
        scene.look()
    assert len(scene.told("rewards_slow")) == 3


def test_counts_of_a_wait_begin_with_the_step() -> None:
    scene = Scene(valid=100, timeouts=3, pending=0)
    scene.look()
    scene.watch.begin_step()
    scene.pending = 32
    for _ in range(12):
        scene.look()
    scene.valid, scene.timeouts, scene.pending = 120, 5, 10
    scene.watch._slow_told = 0.0
    scene.look()
    assert scene.told("rewards_slow")[-1].endswith("20 of 32 scored, judge timed out 2 times")


def test_the_whole_number_of_failures_is_told_when_the_run_ends() -> None:
    scene = Scene(valid=1)
    for count in (1, 5, 9):
        scene.timeouts = count
        scene.look()
    assert [fields["count"] for kind, _, fields in scene.events if kind == "reward_failed"] == [1]
    scene.watch.tell_all()
    scene.watch.tell_all()
    assert [fields["count"] for kind, _, fields in scene.events if kind == "reward_failed"] == [1, 9]


def test_the_first_timeout_says_what_it_does_to_a_step() -> None:
    scene = Scene(timeouts=1)
    scene.look()
    (text,) = scene.told("reward_failed")
    assert "'judge' gave no number in 1 of 1 scorings (timeout): no result within 5 s" in text
    assert text.endswith(
        "Each takes a scorer for reward.0.timeout: 5 s: a step in which all do lasts 2:40 min with 1 scorer"
    )


def test_a_run_in_which_no_rollout_gets_a_reward_ends_after_its_patience() -> None:
    scene = Scene()
    scene.watch.begin_step()
    for second in range(60):
        scene.timeouts = second // 5
        scene.look()
    with pytest.raises(RewardsFail, match=r"no rollout got a reward in .*scoring\.patience: 60.*gave no number in"):
        scene.look()


def test_a_run_that_never_had_a_reward_ends_after_the_rollouts_of_a_step() -> None:
    scene = Scene(loop_config(JUDGE, "learner.prompts_per_step=40"), timeouts=40)
    scene.look()  # an evaluation before the first step has no say
    scene.watch.begin_step()
    scene.timeouts += scene.config.rollouts_per_step - 1
    scene.look()
    scene.timeouts += 1
    with pytest.raises(RewardsFail, match="none of the first 360 rollouts got a reward; reward 'judge'"):
        scene.look()


def test_time_in_which_nothing_is_waited_for_does_not_count() -> None:
    scene = Scene(valid=10, timeouts=2)
    scene.look()
    for _ in range(20):
        scene.look(400.0)  # updates between the looks
    scene.pending = 0
    for _ in range(400):
        scene.look()
    assert scene.watch.hopeless() is None


@given(st.lists(st.tuples(st.floats(0.1, 400.0), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_it_is_given_up_only_after_its_patience_without_a_reward(looks: list[tuple[float, int, int, int]]) -> None:
    scene, in_vain, failed = Scene(valid=1), 0.0, 0
    scene.look()
    before = scene.pending
    try:
        for seconds, valid, timeouts, scene.pending in looks:
            scene.valid, scene.timeouts = scene.valid + valid, scene.timeouts + timeouts
            in_vain = 0.0 if valid else in_vain + (seconds if seconds <= 10 and before else 0.0)
            failed, before = 0 if valid else failed + timeouts, scene.pending
            scene.look(seconds)
            assert in_vain < 60 or failed < 2
    except RewardsFail:
        assert in_vain >= 60 - 1e-6
        assert failed >= 2


def test_an_evaluation_in_which_every_reward_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pods_cluster.run.reward_watch.POLL_SECONDS", 0.001)
    scene = Scene(timeouts=5)

    class Pool:
        scoring = scene.totals

        async def observe(self) -> None:
            scene.now += 1.0
            scene.timeouts += 1
            scene.update()

    async def forever() -> None:
        await asyncio.sleep(60)

    async def answer() -> int:
        return 3

    assert asyncio.run(scene.watch.during(answer(), cast(Any, Pool()))) == 3
    with pytest.raises(RewardsFail, match=r"scoring\.patience"):
        asyncio.run(scene.watch.during(forever(), cast(Any, Pool())))
