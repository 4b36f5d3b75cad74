"""Whole groups that a run keeps for people to read: trained ones, and dropped ones with the reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.run import step_assembly
from pods_cluster.run.errors import RunError
from pods_cluster.types import GroupId
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def samples(loop: Loop) -> list[dict[str, Any]]:
    return loop.folder.read_samples()


def half_without_signal(group: GroupId, index: int) -> float:
    return 0.25 if group.row % 2 else float(index % 2)


def test_dropped_groups_are_kept_beside_the_trained_ones_with_their_fate(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=4", "run.samples_every=2"), tmp_path, half_without_signal)
    loop.main()
    found = samples(loop)
    assert [(sample["step"], sample["fate"]) for sample in found] == [
        *[(1, "no_signal")] * 2,  # the first that are dropped, whatever step it is
        *[(step, fate) for step in (2, 4) for fate in ("trained", "trained", "no_signal", "no_signal")],
    ]
    for sample in found:
        assert [row["index"] for row in sample["rollouts"]] == list(range(8)), "every rollout, also of a dropped group"
        kept = sum(row["kept"] for row in sample["rollouts"])
        assert kept == (4 if sample["fate"] == "trained" else 0)
        if sample["fate"] == "no_signal":
            assert sample["reason"] == "dropped: all 8 rewards are 0.25, which teaches nothing"
            assert {row["reward"] for row in sample["rollouts"]} == {0.25}


def test_a_run_without_any_signal_leaves_groups_to_look_at(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=50", "run.samples_every=5"), tmp_path, lambda group, index: 0.0)
    with pytest.raises(RunError, match="no group to train on"):
        loop.main()
    assert [(sample["step"], sample["fate"]) for sample in samples(loop)] == [(1, "no_signal")] * 2 + [
        (5, "no_signal")
    ] * 2, "those of the first step, and of the last one, which ended the run"


def test_groups_with_too_few_rewards_say_how_many_there_are(tmp_path: Path) -> None:
    config = loop_config("run.steps=1", "run.samples_every=1", "run.samples_groups=1", "selector.min_valid=3")
    loop = Loop(config, tmp_path, lambda group, index: float(index) if group.row or index < 2 else math.nan)
    loop.main()
    dropped = [sample for sample in samples(loop) if sample["fate"] != "trained"]
    assert [sample["fate"] for sample in dropped] == ["too_few_valid"]
    assert dropped[0]["reason"] == "dropped: 2 of 8 rollouts can be trained on, 3 are needed"
    assert [row["reward"] for row in dropped[0]["rollouts"]] == [0.0, 1.0, *[None] * 6]


def test_a_group_that_the_learner_lost_is_not_called_trained(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=1", "run.samples_every=1", "run.samples_groups=9"), tmp_path)
    loop.learners.lose = lambda group: group.row == 2 and group.attempt == 0
    loop.main()
    assert {sample["group"]: sample["fate"] for sample in samples(loop)} == {
        "0.0.0": "trained",
        "0.1.0": "trained",
        "0.2.0": "lost",
        "0.3.0": "trained",
    }


def test_nothing_is_kept_where_samples_are_off(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=2", "run.samples_every=0"), tmp_path, half_without_signal)
    loop.main()
    assert not samples(loop)
