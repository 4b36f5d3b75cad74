"""A run that begins again from an older state makes the steps of one in which nothing failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import Config
from pods_cluster.generation.messages import Portion
from pods_cluster.learning.reports import LearnerError, StepResult
from pods_cluster.run import checkpoints
from pods_cluster.run.errors import SelectorLost
from pods_cluster.types import Selection
from tests.run.made_up_loop import Loop
from tests.run.parts import CoreSelector, Learners, loop_config


class Faulty(Learners):
    """A learner whose n-th calls to train fail."""

    failing: frozenset[int] = frozenset()
    calls = 0
    trained: dict[int, list[int]]

    async def train(self, selections: list[Selection], step: int) -> StepResult:
        self.calls += 1
        if self.calls in self.failing:
            raise LearnerError("rank 1 died")
        self.trained[step] = sorted(selection.group.row for selection in selections)
        return await super().train(selections, step)


class FaultySelector(CoreSelector):
    """A selector whose n-th answer about selections does not come."""

    def __init__(self, config: Config, failing: int = -1) -> None:
        super().__init__(config)
        self.left = failing

    async def collect(self, want: int, version: int, timeout: float) -> Any:
        self.left -= 1
        if self.left == 0:
            raise SelectorLost("the selector died")
        return await super().collect(want, version, timeout)


def rows_by_step(
    config: Config, folder: Path, learner: frozenset[int] = frozenset(), selector: int = -1
) -> tuple[Loop, dict[int, list[int]]]:
    """What each step trained; after a fault the run begins again as `Recovery` has it, with made-up stages."""
    loop = Loop(config, folder)
    learners = Faulty()
    learners.failing, learners.trained = learner, {}
    run = loop.run
    run.learners = run.updates._learners = run.saver._learners = learners
    run.begin_again(first := run.state(), chosen := FaultySelector(config, selector), saved=False)
    loop.pool.selector = chosen

    async def main() -> None:
        while True:
            try:
                return await run.main()
            except LearnerError:
                path, _ = checkpoints.newest_sound(loop.folder.checkpoints)
                state = checkpoints.read_state(path) if path is not None else first
                run.recorder.take_back(state.step)
            except SelectorLost:
                assert not run.learner_changes
                await run.assembler.cancel_all(told=False)
                state = run.state()
            loop.pool.selector = again = CoreSelector(config)
            run.begin_again(state, again, saved=state is not first)

    try:
        asyncio.run(main())
    finally:
        loop.recorder.close()
    return loop, learners.trained


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_steps_are_those_of_a_run_in_which_nothing_failed(tmp_path: Path, staleness: int) -> None:
    config = loop_config("run.steps=8", "run.checkpoint.every=3", f"staleness={staleness}", "generator.in_flight=8")
    _, whole = rows_by_step(config, tmp_path / "whole")
    loop, rows = rows_by_step(config, tmp_path / "broken", learner=frozenset({2, 6}))
    assert rows.keys() == whole.keys() == set(range(8))
    if staleness == 0:
        assert rows == whole
    else:  # which of the groups in flight comes first is another thing, that each comes once is not
        trained = [row for step in rows.values() for row in step]
        assert len(set(trained)) == len(trained)
    assert not loop.run.ledger.in_flight
    steps = [record["step"] for record in loop.folder.read_metrics() if "timing_s/step" in record]
    assert steps == list(range(1, 9)), "a step is missing, or stands twice"


def test_a_lost_selector_costs_no_step(tmp_path: Path) -> None:
    config = loop_config("run.steps=4")
    loop, rows = rows_by_step(config, tmp_path, selector=3)
    assert rows.keys() == set(range(4))
    assert loop.run.step == 4


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_more_is_in_flight_after_a_resume_than_before_it(tmp_path: Path, staleness: int) -> None:
    """Another process goes on from a state: the groups that were out come again first, as the same attempts."""
    config = loop_config("run.steps=8", f"staleness={staleness}", "generator.in_flight=64")

    def watched(loop: Loop) -> tuple[list[int], list[tuple[int, int]]]:
        sizes, issued = list[int](), list[tuple[int, int]]()
        submit = loop.pool.submit

        async def submit_and_look(portions: Sequence[Portion]) -> None:
            sizes.append(len(loop.run.ledger.in_flight))
            issued.extend((portion.group.row, portion.group.attempt) for portion in portions)
            await submit(portions)

        loop.pool.submit = submit_and_look  # type: ignore[method-assign]
        return sizes, issued

    before = Loop(config, tmp_path / "before")
    sizes, _ = watched(before)
    saved: list[tuple[checkpoints.RunState, list[tuple[int, int]]]] = []
    train = before.learners.train

    async def train_and_save(selections: list[Selection], step: int) -> StepResult:
        async with asyncio.timeout(30):
            while before.run.ledger.free and step < 6:  # the generators go on while the ranks train
                await asyncio.sleep(0)
        out = [(group.row, group.attempt) for group in before.run.ledger.in_flight]
        saved.append((before.run.state(), out))
        return await train(selections, step)

    before.learners.train = train_and_save  # type: ignore[method-assign]
    before.main()
    state, out = saved[3]
    assert len(out) == before.run.ledger.capacity
    after = Loop(config, tmp_path / "after")
    sizes_after, issued = watched(after)
    after.run.begin_again(state, after.selector, saved=False)
    assert not after.run.ledger.in_flight
    after.main()
    assert issued[: len(out)] == out
    assert max(sizes_after) <= max(sizes) <= after.run.ledger.capacity
    assert after.run.ledger.issued - state.ledger["issued"] == len(issued), (
        "none of those that were out is counted again"
    )
    trained = [
        row for _, selections in enumerate(before.learners.steps[:3]) for row in [s.group.row for s in selections]
    ]
    assert sorted(trained + after.trained_rows()) == list(range(32))
