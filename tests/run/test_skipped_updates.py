"""Updates that are skipped leave the version as it is, are told and counted; too many in a row end the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.learning.reports import RankResult, SkippedUpdate, merge_skipped
from pods_cluster.run import step_assembly
from pods_cluster.run.errors import TrainingFails
from pods_cluster.types import GroupId
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config

BAD = SkippedUpdate(0, (GroupId(0, 3, 0),))


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_skipped_step_makes_no_version(tmp_path: Path, staleness: int) -> None:
    loop = Loop(loop_config("run.steps=6", f"staleness={staleness}"), tmp_path)
    loop.learners.skips = lambda step: [BAD] if step in (1, 3) else []
    loop.main()
    assert loop.publisher.published == [0, 1, 2, 3, 4]
    records = loop.folder.read_metrics()
    assert [record["updates"] for record in records] == [1, 0, 1, 0, 1, 1]
    assert [record["updates_skipped"] for record in records] == [0, 1, 0, 1, 0, 0]
    assert [record["rollouts/trained"] for record in records] == [16, 0, 16, 0, 16, 16]
    assert [record["health/updates-skipped"] for record in records] == [0, 1, 1, 1, 1, 1]
    events = [event for event in loop.folder.read_events() if event["kind"] == "update_skipped"]
    assert [event["level"] for event in events] == ["warning"] * 2
    assert all(f"the loss of group {BAD.groups[0]} is not finite" in event["text"] for event in events)


def test_too_many_in_a_row_end_the_run_at_the_last_good_checkpoint(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=20", "learner.max_skipped=3", "run.checkpoint.every=2"), tmp_path)
    loop.learners.skips = lambda step: [BAD] if step in (1, 2) or step >= 4 else []
    with pytest.raises(TrainingFails, match=r"3 updates in a row .*version 2; the last checkpoint is .*step-000006"):
        loop.main()
    assert loop.run.step == 6


def test_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=20", "learner.max_skipped=1"), tmp_path)
    loop.learners.skips = lambda step: [SkippedUpdate(0)]
    with pytest.raises(TrainingFails, match=r"the gradient is not finite.*no checkpoint was saved yet"):
        loop.main()


def test_the_search_for_the_loss_scale_of_float16_is_no_failure(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=12", "learner.max_skipped=3"), tmp_path)
    loop.learners.skips = lambda step: [SkippedUpdate(0, (), overflow=True)] if step < 8 else []
    loop.main()
    records = loop.folder.read_metrics()
    assert sum(record.get("updates_overflowed", 0) for record in records) == 8
    assert not any(record["updates_skipped"] or record["health/updates-skipped"] for record in records)
    assert {event["level"] for event in loop.folder.read_events() if event["kind"] == "update_skipped"} == {"info"}


def test_what_the_ranks_saw_becomes_one() -> None:
    one, two = GroupId(0, 1, 0), GroupId(0, 2, 0)
    ranks = [
        RankResult(skipped=[SkippedUpdate(0), SkippedUpdate(2, (one,))]),
        RankResult(skipped=[SkippedUpdate(0), SkippedUpdate(2, (one, two))]),
    ]
    assert merge_skipped(ranks) == [SkippedUpdate(0), SkippedUpdate(2, (one, two))]
    assert [skip.overflow for skip in merge_skipped(ranks, float16=True)] == [True, False]
    assert merge_skipped([]) == []
    many = SkippedUpdate(0, tuple(GroupId(0, row, 0) for row in range(9)))
    assert many.cause.endswith("and 6 more is not finite")
