"""A disk that does not take a checkpoint costs the checkpoint, not the run; only the last one ends it, with its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pods_cluster.run import checkpoints, saving, step_assembly
from pods_cluster.run.controller import Controller
from pods_cluster.run.errors import RunError
from pods_cluster.run.reward_log import RewardLog
from pods_cluster.scoring.scorer_output import Printed, PrintedLine
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def full_from_to(loop: Loop, first: int, last: int) -> None:
    """The disk takes nothing after these steps."""
    train = loop.learners.train

    async def train_then_look(selections: Any, step: int) -> Any:
        loop.learners.full = first <= step + 1 <= last
        return await train(selections, step)

    loop.learners.train = train_then_look  # type: ignore[method-assign]


def told(loop: Loop, kind: str) -> list[str]:
    return [event["text"] for event in loop.folder.read_events() if event["kind"] == kind]


def test_checkpoints_that_fail_are_told_and_tried_again_and_the_last_good_one_stays(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=8", "run.checkpoint={every: 1, keep: 2}"), tmp_path)
    full_from_to(loop, 4, 6)
    loop.main()
    assert loop.trained_rows() == list(range(32))
    (text,) = told(loop, "checkpoint_failed")  # within REPEAT_SECONDS once
    assert "step 4" in text
    assert "No space left on device" in text
    assert "the newest checkpoint is step-000003" in text
    assert told(loop, "checkpoint")[3] == "saved step-000007 after 3 that failed"
    assert sorted(path.name for path in loop.folder.checkpoints.iterdir()) == ["step-000007", "step-000008"]
    failed = [record.get("checkpoint/failed", 0) for record in loop.folder.read_metrics()]
    assert failed == [0, 0, 0, 1, 2, 3, 0, 0]
    health = [record["health/checkpoint-failed"] for record in loop.folder.read_metrics()]
    assert health == [0, 0, 0, 1, 1, 1, 0, 0]


def test_the_warning_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "REPEAT_SECONDS", 0.0)
    loop = Loop(loop_config("run.steps=5", "run.checkpoint.every=1"), tmp_path)
    full_from_to(loop, 2, 4)
    loop.main()
    texts = told(loop, "checkpoint_failed")
    assert [f"{count} failed in a row" in text for count, text in enumerate(texts, 1)] == [True] * 3


def test_a_checkpoint_by_the_clock_is_not_tried_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(loop_config("run.steps=6", "run.checkpoint={every: 0, minutes: 1.0e-9}"), tmp_path)
    full_from_to(loop, 1, 5)
    loop.main()
    assert [record.get("checkpoint/failed", 0) for record in loop.folder.read_metrics()] == [1] * 6
    assert checkpoints.latest(loop.folder.checkpoints) is not None  # the last step's is written whenever


@pytest.mark.parametrize("overrides", [["run.export=false"], ["run.export=true"]])
def test_a_last_checkpoint_that_fails_ends_the_run_with_its_cause(tmp_path: Path, overrides: list[str]) -> None:
    loop = Loop(loop_config("run.steps=3", "run.checkpoint.every=2", *overrides), tmp_path)
    full_from_to(loop, 3, 3)
    with pytest.raises(
        RunError, match=r"the last checkpoint, of step 3, .*No space left.*newest checkpoint is step-000002"
    ):
        loop.main()
    assert [path.name for path in loop.folder.checkpoints.iterdir()] == ["step-000002"]


def test_a_final_model_that_cannot_be_written_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=2", "run.export=true"), tmp_path)
    export = loop.learners.export

    async def no_room_for_the_second(path: Path) -> list[str]:
        loop.learners.full = path == loop.folder.model
        return await export(path)

    loop.learners.export = no_room_for_the_second  # type: ignore[method-assign]
    with pytest.raises(
        RunError, match=r"the model could not be written to .*No space left.*newest checkpoint is step-000002"
    ):
        loop.main()


def test_a_folder_that_cannot_be_made_costs_no_step(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=3", "run.checkpoint.every=1"), tmp_path)
    loop.folder.checkpoints.rmdir()
    loop.folder.checkpoints.touch()  # in place of the folder
    with pytest.raises(RunError, match="the last checkpoint, of step 3"):
        loop.main()
    assert loop.run.step == 3
    assert "Not a directory" in told(loop, "checkpoint_failed")[0]


def test_what_rewards_print_is_lost_and_told_once(tmp_path: Path) -> None:
    controller = Controller(loop_config(), resume=False)
    folder = RunFolder.create(tmp_path, "loop", "")
    folder.rewards_log.symlink_to("/dev/full")
    controller._reward_log = RewardLog(folder.rewards_log)
    with Recorder() as controller.recorder:
        for number in range(3):
            controller._log_printed("loop/generator/0", Printed((PrintedLine("judge", f"line {number}", 0.0),)))
        (event,) = [record for _, record in controller.recorder.poll().items]
    assert (event["kind"], event["level"]) == ("telemetry", "warning")
    assert "No space left on device" in event["text"]
    assert event["text"].endswith("training goes on")
