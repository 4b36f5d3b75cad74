"""The loop when workers die, take no weights, or lose rollouts on their way to the learner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.generation.messages import Failure, WorkerPhase
from pods_cluster.learning.reports import StepResult
from pods_cluster.run import step_assembly
from pods_cluster.types import Fate, GroupId, Selection
from pods_cluster.weights.broadcast import PublishReport
from tests.run.made_up_loop import Loop, until
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def test_groups_of_a_dead_worker_are_made_again(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    loop.pool.hold = lambda group: group.attempt == 0 and group.row == 2
    loop.pool.failures = [Failure("loop/generator/0", "died: killed", [GroupId(0, 2)])]
    loop.main()
    assert sorted(loop.trained_rows()) == list(range(8))
    assert loop.fates == {Fate.TRAINED: 8, Fate.LOST: 1}
    assert list(loop.pool.handles) == ["loop/generator/1"]
    kinds = [event["kind"] for event in loop.folder.read_events()]
    assert "worker_failed" in kinds
    assert "worker_replaced" in kinds


def test_a_worker_that_dies_with_selected_rollouts_costs_only_what_the_learner_could_not_take(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    loop.pool.hold = lambda group: group.attempt == 0 and group.row == 3
    # groups 0 to 2 are selected, and still lie with the worker, when it is found dead
    loop.pool.failures = [Failure("loop/generator/0", "died: killed", [GroupId(0, row) for row in range(4)])]
    loop.learners.lose = lambda group: group.attempt == 0 and group.row in (0, 1)
    loop.main()
    assert loop.fates == {Fate.TRAINED: 6, Fate.LOST: 3}
    assert not loop.run.ledger.in_flight
    assert {selection.group for selection in loop.learners.steps[1]} == {
        GroupId(0, 0, 1),
        GroupId(0, 1, 1),
        GroupId(0, 4),
        GroupId(0, 5),
    }


def test_a_run_goes_on_with_fewer_workers_where_there_is_no_room_for_another(tmp_path: Path):
    loop = Loop(loop_config("generator.workers=2", "cluster.placement_timeout=0.01"), tmp_path)
    loop.pool.handles["loop/generator/1"] = object()
    loop.pool.count, loop.pool.room = 2, 1
    loop.pool.failures = [Failure("loop/generator/1", "its node died", [])]
    loop.pool.hold = lambda group: len(loop.pool.handles) == 2  # the workers' health is looked at while nothing comes

    async def main() -> None:
        running = asyncio.ensure_future(loop.run.main())
        await until(lambda: loop.run.scaler.target.generators == 1)
        loop.pool.hold = lambda group: False
        for group in loop.pool.held:
            loop.pool.finish(group, range(loop.pool.size))
        await running

    try:
        asyncio.run(main())
    finally:
        loop.recorder.close()
    assert loop.run.step == 3
    assert list(loop.pool.handles) == ["loop/generator/0"]
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "scale_failed"]
    assert "not placed" in event["text"]
    assert "goes on with 1 generator" in event["text"]


def test_no_step_waits_for_the_worker_that_takes_a_dead_ones_place(tmp_path: Path):
    loop = Loop(loop_config("generator.workers=2", "run.steps=6"), tmp_path)
    loop.pool.handles["loop/generator/1"] = object()
    loop.pool.count, loop.pool.room = 2, 1  # it does not come up yet
    lost = GroupId(0, 2)
    loop.pool.hold = lambda group: group == lost
    loop.pool.failures = [Failure("loop/generator/1", "died: killed", [lost])]
    train = loop.learners.train

    async def train_and_look(selections: list[Selection], step: int) -> StepResult:
        if step == 3:
            assert list(loop.pool.handles) == ["loop/generator/0"]
            loop.pool.room = 99
            await until(lambda: WorkerPhase.READY in loop.pool.starting.values())
        return await train(selections, step)

    loop.learners.train = train_and_look  # type: ignore[method-assign]
    loop.main()
    assert sorted(loop.trained_rows()) == list(range(24))
    assert list(loop.pool.handles) == ["loop/generator/0", "loop/generator/2"]
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "worker_replaced"]
    assert event["text"] == "loop/generator/2 serves version 4 in place of loop/generator/1"
    assert event["step"] == 4


def test_a_worker_that_takes_no_weights_is_replaced(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    loop.publisher.fails = lambda version, worker: version == 1 and worker == "loop/generator/0"
    loop.main()
    assert list(loop.pool.handles) == ["loop/generator/1"]
    assert sorted(loop.trained_rows()) == list(range(8))


def test_a_version_that_had_to_be_sent_again_is_told_with_the_cause(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    publish = loop.publisher.publish

    async def publish_twice(version: int, workers: Any) -> PublishReport:
        report = await publish(version, workers)
        return replace(report, attempts=2, resent={"loop/generator/0": "no stream"}) if version == 1 else report

    loop.publisher.publish = publish_twice  # type: ignore[method-assign]
    loop.main()
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "weights_resent"]
    assert event["text"].startswith("version 1 was sent 2 times")
    assert "loop/generator/0: no stream" in event["text"]
    assert list(loop.pool.handles) == ["loop/generator/0"], "nobody is replaced for it"


def test_groups_lost_on_their_way_to_the_learner_come_again(tmp_path: Path):
    loop = Loop(loop_config("run.steps=2"), tmp_path)
    loop.learners.lose = lambda group: group.row == 3 and group.attempt == 0
    loop.main()
    trained = loop.trained_rows()
    assert trained.count(3) == 2  # once handed over and lost, once trained
    assert loop.fates == {Fate.TRAINED: 7, Fate.LOST: 1}
    (event,) = [event for event in loop.folder.read_events() if event["kind"] == "groups_lost"]
    assert event["text"] == (
        "1 group lost between selection and update: 4 of 4 kept rollouts are missing: worker loop/generator/0 died (4)"
    )
