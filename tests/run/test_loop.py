"""The loop with the real selector core and made-up rollouts: fates, replacements, staleness, rewards that fail, stopping."""

from __future__ import annotations

import asyncio
import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.generation.messages import Failure
from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.run import checkpoints, step_assembly
from pods_cluster.run.errors import RunError
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_stats import ScorerStats
from pods_cluster.sizing.step_measurement import StepMeasurement
from pods_cluster.types import Fate, GroupId
from tests.run.made_up_loop import Loop, until
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def test_each_step_trains_its_prompts_once_on_the_newest_weights(tmp_path: Path):
    loop = Loop(loop_config(), tmp_path)
    loop.main()
    assert loop.trained_rows() == list(range(12))
    assert loop.publisher.published == [0, 1, 2, 3]
    assert loop.fates == {Fate.TRAINED: 12}
    for step, selections in enumerate(loop.learners.steps):
        assert all((selection.first_versions == step).all() for selection in selections)
        assert all(len(selection) == 4 for selection in selections)


def test_a_group_without_signal_is_replaced_by_another_prompt(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path, lambda group, index: 0.0 if group.row == 1 else float(index % 2))
    loop.main()
    assert [len(step) for step in loop.learners.steps] == [4, 4]
    assert loop.trained_rows() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert loop.fates == {Fate.TRAINED: 8, Fate.NO_SIGNAL: 1}


def test_drop_makes_the_step_smaller(tmp_path: Path):
    config = loop_config("run.steps=1", "selector.no_signal=drop")
    loop = Loop(config, tmp_path, lambda group, index: 0.0 if group.row == 1 else float(index % 2))
    loop.main()
    assert loop.trained_rows() == [0, 2, 3]


def test_keep_trains_groups_without_signal(tmp_path: Path):
    loop = Loop(loop_config("run.steps=1", "selector.no_signal=keep"), tmp_path, lambda group, index: 1.0)
    loop.main()
    assert loop.trained_rows() == [0, 1, 2, 3]


def test_replacements_are_bounded_and_a_run_without_signal_ends(tmp_path: Path):
    loop = Loop(loop_config("run.steps=50", "selector.max_replacements=2"), tmp_path, lambda group, index: 1.0)
    with pytest.raises(RunError, match=r"no group to train on.*5th step in a row"):
        loop.main()
    # four prompts and eight replacements a step, five steps
    assert loop.fates == {Fate.NO_SIGNAL: 60}
    assert loop.learners.steps == []


def test_waves_issue_what_is_needed_and_say_what_was_saved(tmp_path: Path):
    config = loop_config("run.steps=2", "selector.settle=waves", "selector.waves=2")
    # row 1 needs its second portion, the others are settled by the first
    loop = Loop(config, tmp_path, lambda group, index: float(index > 4 if group.row == 1 else index % 2))
    loop.main()
    assert sorted(loop.trained_rows()) == list(range(8))
    issued = [(portion.group.row, portion.start, portion.stop) for portion in loop.pool.portions]
    assert [portion for portion in issued if portion[1]] == [(1, 4, 8)]
    record = loop.folder.read_metrics()[0]
    assert record["groups/settled"] == 3
    assert record["groups/settled_share"] == 0.75
    assert record["rollouts/unissued"] == 12
    assert record["tokens/saved"] == 36
    assert record["rollouts/generated"] == 20
    assert record["tokens/sampled"] == 60
    assert record["reward/settled"] == 0.5
    assert record["reward/uncensored"] == 6 / 16
    assert [selection.settled for selection in loop.learners.steps[0]].count(True) == 3


def test_what_attends_to_the_generators_fails_the_run(tmp_path: Path):
    loop = Loop(loop_config("selector.settle=waves", "selector.waves=2"), tmp_path)

    async def instructions(timeout: float) -> Any:
        raise ValueError("a report to the selector failed")

    loop.selector.instructions = instructions  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a report to the selector failed"):
        loop.main()


def test_missing_rewards_never_train(tmp_path: Path):
    def rewards(group: GroupId, index: int) -> float:
        if group.row == 0 and index < 6:
            return math.nan
        return float(index % 2)

    loop = Loop(loop_config("run.steps=1"), tmp_path, rewards)
    loop.main()
    assert loop.fates == {Fate.TRAINED: 4, Fate.TOO_FEW_VALID: 1}
    assert loop.trained_rows() == [1, 2, 3, 4]
    record = loop.folder.read_metrics()[-1]
    assert record["rollouts/excluded"] == 6


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_rollout_older_than_the_bound_is_trained(tmp_path: Path, staleness: int):
    loop = Loop(loop_config(f"staleness={staleness}", "run.steps=8"), tmp_path)
    loop.main()
    ages = [
        version - first
        for version, selections in enumerate(loop.learners.steps)
        for selection in selections
        for first in selection.first_versions
    ]
    assert max(ages) == staleness
    assert sorted(loop.trained_rows()) == list(range(32))
    assert not loop.run.ledger.in_flight


def test_a_step_that_never_fills_ends_with_what_it_waits_for(tmp_path: Path):
    loop = Loop(loop_config("run.step_timeout=0.1"), tmp_path)
    loop.pool.hold = lambda group: group.row == 1
    with pytest.raises(RunError, match=r"run\.step_timeout: 0\.1 s passed and the step has 3 of 4 groups"):
        loop.main()


def test_stop_saves_a_state_that_serves_every_prompt_once(tmp_path: Path):
    loop = Loop(loop_config("run.steps=10", "staleness=1"), tmp_path)
    train = loop.learners.train

    async def train_then_stop(selections: Any, step: int) -> Any:
        if step == 1:
            await until(lambda: len(loop.run.ledger.in_flight) == loop.run.ledger.capacity)  # issued beside the update
            loop.run.stop("Ctrl-C")
        return await train(selections, step)

    loop.learners.train = train_then_stop  # type: ignore[method-assign]
    loop.main()
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    state = checkpoints.read_state(saved)
    assert state.step == 2
    trained = loop.trained_rows()
    again = sorted(state.stream["returned"])
    assert sorted(trained + again) == list(range(state.stream["next"]))
    assert loop.fates[Fate.CANCELLED] == len(again) == 4


@pytest.mark.parametrize("no_signal", ["drop", "replace"])
def test_a_step_that_is_broken_off_is_the_same_step_when_the_run_goes_on(tmp_path: Path, no_signal: str):
    """Groups that ended without signal in it are served again too, in their old places and as the same attempts."""

    def rewards(group: GroupId, index: int) -> float:
        return 0.0 if group.row in (1, 5, 6) else float(index % 2)

    settings = ("run.steps=3", f"selector.no_signal={no_signal}")
    whole = Loop(loop_config(*settings), tmp_path / "whole", rewards)
    whole.main()
    broken = Loop(loop_config(*settings), tmp_path / "broken", rewards)
    slow = 7 if no_signal == "drop" else 9
    broken.pool.hold = lambda group: group.row == slow  # all others of the second step have ended
    check = broken.pool.check

    async def check_then_stop() -> list[Failure]:
        if broken.pool.held:
            broken.run.stop("Ctrl-C")
        return await check()

    broken.pool.check = check_then_stop  # type: ignore[method-assign]
    broken.main()
    saved = checkpoints.latest(broken.folder.checkpoints)
    assert saved is not None
    assert checkpoints.read_state(saved).step == 1
    assert broken.fates[Fate.NO_SIGNAL] == 1  # that of the first step alone
    resumed = Loop(loop_config(*settings), tmp_path / "resumed", rewards)
    asyncio.run(resumed.run.restore(saved))
    resumed.main()
    groups = [[selection.group for selection in step] for step in broken.learners.steps + resumed.learners.steps]
    assert groups == [[selection.group for selection in step] for step in whole.learners.steps]
    assert resumed.fates | {Fate.CANCELLED: 0} == whole.fates | {Fate.CANCELLED: 0}


@pytest.mark.parametrize("no_signal", ["keep", "drop", "replace"])
def test_a_step_trains_its_groups_in_the_order_of_issue_whichever_ends_first(tmp_path: Path, no_signal: str):
    loop = Loop(
        loop_config("run.steps=2", f"selector.no_signal={no_signal}"),
        tmp_path,
        lambda group, index: 0.0 if group.row == 1 else float(index % 2),
    )
    loop.pool.hold = lambda group: group.row in (0, 6)
    check = loop.pool.check

    async def finish_then_check() -> list[Failure]:
        for group in loop.pool.held:
            loop.pool.finish(group, range(loop.pool.size))
        loop.pool.held.clear()
        return await check()

    loop.pool.check = finish_then_check  # type: ignore[method-assign]
    loop.main()
    assert [len(step) for step in loop.learners.steps] == [3 if no_signal == "drop" else 4, 4]
    for step in loop.learners.steps:
        rows = [selection.group.row for selection in step]
        assert rows == sorted(rows)


def test_a_restored_run_goes_on_where_it_stopped(tmp_path: Path):
    first = Loop(loop_config("run.steps=2"), tmp_path / "a")
    first.main()
    saved = checkpoints.latest(first.folder.checkpoints)
    assert saved is not None
    second = Loop(loop_config("run.steps=4"), tmp_path / "b")
    asyncio.run(second.run.restore(saved))
    second.main()
    assert second.learners.loaded == saved / "learner"
    assert second.publisher.published[0] == 2  # weights go out before the first rollout
    assert second.trained_rows() == list(range(8, 16))
    assert second.fates == {Fate.TRAINED: 16}


def test_tokens_and_prompts_are_counted_over_a_resume(tmp_path: Path):
    first = Loop(loop_config("run.steps=2"), tmp_path / "first")
    real = first.stream.next

    def dropping(count: int) -> list[Any]:
        first.stream.dropped += 2
        return real(count)

    first.stream.next = dropping
    first.main()
    second = Loop(loop_config(), tmp_path / "second")
    asyncio.run(second.run.restore(first.folder.checkpoints / "step-000002"))
    second.main()
    records = [*first.folder.read_metrics(), *second.folder.read_metrics()]
    assert [record["num_tokens"] for record in records] == [80, 160, 240]  # 16 rollouts a step, 2 + 3 tokens each
    assert [record["data/prompts_served"] for record in records] == [4, 4, 4]
    assert [record["data/prompts_dropped_overlong"] for record in records] == [2, 2, 0]
    assert [record["epoch"] for record in records] == [0.004, 0.008, 0.012]
    assert all(record["memory/controller/rss"] > 2**20 for record in records)


def test_what_the_loop_measures_is_what_it_records(tmp_path: Path):
    loop = Loop(loop_config("staleness=1"), tmp_path, lambda group, index: 0.0 if group.row == 1 else float(index % 2))
    stats, after_step = loop.pool.stats, loop.run.balancer.after_step
    measured: list[StepMeasurement] = []
    left: list[int] = []

    async def some_stats() -> PoolStats:
        return replace(await stats(), generated_tokens=90, seconds=0.5, occupied_seconds=0.25)

    def remember(step: StepMeasurement, **more: Any) -> dict[str, float]:
        measured.append(step)
        left.append(more["in_flight"])
        return after_step(step, **more)

    loop.pool.stats = some_stats  # type: ignore[method-assign]
    loop.run.balancer.after_step = remember  # type: ignore[method-assign]
    loop.main()
    assert measured[0].generated_rollouts > measured[0].trained_rollouts > 0
    assert measured[0].saturated_rate == 180.0
    assert max(left) <= 4, "groups that were issued since the step before are not among those that were left by it"
    for step, record in zip(measured, loop.folder.read_metrics(), strict=True):
        # what is recorded as saturated is never below the step's own rate
        expected = replace(step, best_generator_rate=step.saturated_rate)
        assert astuple(StepMeasurement.from_record(record)) == pytest.approx(astuple(expected))


def test_what_had_to_be_changed_to_save_the_model_is_told_once(tmp_path: Path):
    loop = Loop(loop_config("run.checkpoint.every=1", "run.export=true"), tmp_path)
    loop.learners.export_notes = ["generation_config.temperature: 0.6 is left out"]
    loop.main()
    told = [event for event in loop.folder.read_events() if event["kind"] == "model_changed"]
    assert [(event["text"], event["level"]) for event in told] == [(loop.learners.export_notes[0], "warning")]


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [1, 2, 3]), (0, [3]), (600, [3])])
def test_a_checkpoint_is_due_by_time_too(tmp_path: Path, minutes: float, steps: list[int]):
    loop = Loop(loop_config("run.checkpoint.every=0", f"run.checkpoint.minutes={minutes}"), tmp_path)
    loop.main()
    saved = [event["step"] for event in loop.folder.read_events() if event["kind"] == "checkpoint"]
    assert saved == steps


def failing_rewards(loop: Loop, scored: int, failed: int) -> None:
    """Scorers that could not score `failed` of `scored` rollouts."""
    kinds = {"judge": {FailureKind.ERROR: failed}}
    texts = {"judge": {FailureKind.ERROR: ["KeyError: 'level' (rewards.py:2 in needs_level)"]}}
    loop.pool.scoring.update({"loop/generator/0": ScorerStats(scored, failed, 0, kinds, {}, texts)})


def test_rewards_that_fail_are_warned_of_and_end_the_run_with_their_cause(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=50", "selector.max_replacements=2"), tmp_path, lambda group, index: 1.0)
    failing_rewards(loop, 640, 640)
    with pytest.raises(RunError, match=r"'judge' gave no number in 640 of 640 scorings \(error\): KeyError: 'level'"):
        loop.main()
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "reward_failed"]
    assert event["level"] == "warning"
    assert (event["reward"], event["failure"], event["count"], event["share"]) == ("judge", "error", 640, 1.0)
    assert event["message"] == "KeyError: 'level' (rewards.py:2 in needs_level)"


def test_rows_that_cannot_be_rendered_are_warned_of(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    loop.stream.failed, loop.stream.failures = 3, [ValueError("row 20 holds an image")]
    loop.main()
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "prompt_left_out"]
    assert event["text"] == "rows that cannot be rendered are left out, 3 so far; the newest: row 20 holds an image"
