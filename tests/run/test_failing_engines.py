"""Engines that fail again and again: by one prompt, by several, by all, or by chance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.data.errors import DataError
from pods_cluster.generation.messages import Failure, Portion
from pods_cluster.run import checkpoints, step_assembly
from pods_cluster.run.errors import RunError
from pods_cluster.types import Fate, GroupId, Prompt
from tests.law import law
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config

CAUSE = "the engine failed: RuntimeError: illegal memory access"


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def let_engines_fail(loop: Loop, fails: Callable[[Sequence[GroupId]], bool]) -> list[list[int]]:
    """The engine that gets a batch for which `fails` holds ends, with it and what comes after. Returns those batches."""
    ended: list[list[int]] = []
    submit = loop.pool.submit

    async def submit_or_fail(portions: Sequence[Portion]) -> None:
        groups = [portion.group for portion in portions]
        if loop.pool.failures:  # it is dead, and nobody has noticed yet
            loop.pool.failures[0].groups.extend(groups)
            return
        if not fails(groups):
            await submit(portions)
            return
        ended.append([group.row for group in groups])
        loop.pool.failures.append(Failure(next(iter(loop.pool.handles)), CAUSE, groups))

    loop.pool.submit = submit_or_fail  # type: ignore[method-assign]
    return ended


def given_up(loop: Loop) -> list[str]:
    return [event["text"] for event in loop.folder.read_events() if event["kind"] == "prompt_given_up"]


@pytest.mark.parametrize("poison", [{1}, {0}, {1, 2}, {0, 25}, {0, 3, 5, 11}])
def test_a_prompt_that_ends_every_engine_is_found_and_the_run_goes_on(tmp_path: Path, poison: set[int]) -> None:
    loop = Loop(loop_config("run.steps=16"), tmp_path)
    ended = let_engines_fail(loop, lambda groups: any(group.row in poison for group in groups))
    loop.main()
    texts = given_up(loop)
    assert sorted(int(text.split()[1]) for text in texts) == sorted(poison)
    assert all(CAUSE in text and "4 in a row" in text for text in texts)
    trained = loop.trained_rows()
    assert len(set(trained)) == len(trained) == 64
    assert not poison & set(trained)
    assert set(trained) >= {row for row in range(12) if row not in poison}  # the others of those engines come again
    assert sum(record["data/prompts_given_up"] for record in loop.folder.read_metrics()) == len(poison)
    assert len(ended) <= 4 * len(poison)
    assert not poison & {row for _, row, _ in loop.run.assembler.attempts_to_save()}


def test_a_row_that_was_given_up_is_left_out_of_later_epochs_too(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=12"), tmp_path)
    ended = let_engines_fail(loop, lambda groups: any(group.row == 5 for group in groups))
    next_of = loop.stream.next

    def ten_rows(count: int) -> list[Prompt]:
        return [
            prompt if prompt.epoch else replace(prompt, epoch=prompt.row // 10, row=prompt.row % 10)
            for prompt in next_of(count)
        ]

    loop.stream.next = ten_rows  # type: ignore[method-assign]
    loop.main()
    assert len(given_up(loop)) == 1
    assert len(ended) == 4
    assert loop.trained_rows().count(5) == 0
    assert min(loop.trained_rows().count(row) for row in range(10) if row != 5) >= 4
    assert sum(record["data/prompts_given_up"] for record in loop.folder.read_metrics()) == 5
    served: list[Prompt] = []
    loop.stream.next = lambda count: [Prompt(9, 5, "row 5", (1, 2))] * count  # type: ignore[method-assign]
    with pytest.raises(DataError, match="every row ended the engines"):
        served += loop.run.assembler.supply.next(4)


def test_engines_that_never_finish_a_group_end_the_run_after_a_few_starts(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=8"), tmp_path)
    ended = let_engines_fail(loop, lambda groups: True)
    text = r"generators failed 3 times, each time on other prompts.*loop/generator/\d+: the engine failed: RuntimeE"
    with pytest.raises(RunError, match=text):
        loop.main()
    assert ended == [[0, 1, 2, 3], [4], [5]]


@pytest.mark.parametrize("finished_first", [True, False])
def test_engines_that_fail_on_and_on_end_the_run_with_their_error(tmp_path: Path, finished_first: bool) -> None:
    loop = Loop(loop_config("run.steps=8"), tmp_path)
    ended = let_engines_fail(loop, lambda groups: not finished_first or loop.run.step > 0)
    fail = loop.pool.check

    async def by_another_cause_each_time() -> list[Failure]:
        return [replace(failure, cause=f"{failure.cause} {len(ended)}") for failure in await fail()]

    if not finished_first:
        loop.pool.check = by_another_cause_each_time  # type: ignore[method-assign]
    text = (
        r"generator\.max_failures: generators failed 5 times in a row.*loop/generator/\d+: the engine failed: RuntimeE"
    )
    with pytest.raises(RunError, match=text):
        loop.main()
    assert len(ended) == 5


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("poison", [{1, 2, 3}, {0, 1, 2, 3, 4}, {9, 10, 11, 12}])
def test_poison_prompts_close_together_take_no_innocent_row_with_them(
    tmp_path: Path, poison: set[int], staleness: int
) -> None:
    loop = Loop(loop_config("run.steps=12", f"staleness={staleness}", "generator.max_failures=30"), tmp_path)
    let_engines_fail(loop, lambda groups: any(group.row in poison for group in groups))
    loop.main()
    assert {int(text.split()[1]) for text in given_up(loop)} <= poison
    assert not poison & set(loop.trained_rows())


@law(12)
@given(poison=st.sets(st.integers(0, 23), max_size=5), staleness=st.integers(0, 3), prompts=st.integers(1, 5))
def test_no_innocent_row_is_ever_left_out(
    tmp_path_factory: pytest.TempPathFactory, poison: set[int], staleness: int, prompts: int
) -> None:
    overrides = (f"staleness={staleness}", f"learner.prompts_per_step={prompts}", "generator.max_failures=60")
    loop = Loop(loop_config("run.steps=8", *overrides), tmp_path_factory.mktemp("law"))
    let_engines_fail(loop, lambda groups: any(group.row in poison for group in groups))
    try:
        loop.main()
    except RunError as error:
        if "never finished a group" in str(error) and len(poison) >= 3:
            return  # the first three tries were poison, each other rows
        raise
    assert {int(text.split()[1]) for text in given_up(loop)} <= poison
    assert not poison & set(loop.trained_rows())
    assert len(loop.trained_rows()) == len(set(loop.trained_rows())) == 8 * prompts


def test_rows_that_were_given_up_stay_so_after_a_resume(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=6"), tmp_path)
    let_engines_fail(loop, lambda groups: any(group.row == 1 for group in groups))
    loop.main()
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    assert checkpoints.read_state(saved).given_up == [1]
    second = Loop(loop_config("run.steps=12"), tmp_path / "second")
    asyncio.run(second.run.restore(saved))
    second.stream.give_back([Prompt(1, 1, "row 1", (1, 2)), Prompt(1, 2, "row 2", (1, 2))])
    ended = let_engines_fail(second, lambda groups: any(group.row == 1 for group in groups))
    second.main()
    assert ended == []
    assert 2 in second.trained_rows()
    assert 1 not in second.trained_rows()


def test_engines_that_finish_something_may_fail_more_often_than_that(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=20"), tmp_path)
    ended = let_engines_fail(loop, lambda groups: all(group.attempt == 0 for group in groups) and len(groups) == 4)
    loop.main()
    assert len(ended) == 19  # after the first one an engine got a single prompt, which it finished
    assert given_up(loop) == []
    assert sorted(loop.trained_rows()) == list(range(80))


def test_a_node_that_goes_with_all_its_generators_is_one_failure(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=2", "generator.max_failures=2"), tmp_path)
    loop.pool.hold = lambda group: group.attempt == 0 and group.row < 4
    loop.pool.failures = [Failure(f"loop/generator/{i}", "died: node", [GroupId(0, i)]) for i in range(4)]
    loop.pool.handles |= {f"loop/generator/{i}": object() for i in range(4)}
    loop.main()
    assert loop.fates[Fate.LOST] >= 4
    assert given_up(loop) == []


def test_suspects_that_wait_are_served_again_after_a_stop(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=8"), tmp_path)
    let_engines_fail(loop, lambda groups: any(group.row == 1 for group in groups))
    train = loop.learners.train

    async def train_then_stop(selections: Any, step: int) -> Any:
        loop.run.stop("Ctrl-C")
        return await train(selections, step)

    loop.learners.train = train_then_stop  # type: ignore[method-assign]
    loop.main()
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    state = checkpoints.read_state(saved)
    assert sorted(loop.trained_rows() + state.stream["returned"]) == list(range(state.stream["next"]))
    assert len(state.stream["returned"]) >= 2
    second = Loop(loop_config("run.steps=4"), tmp_path / "second")
    asyncio.run(second.run.restore(saved))
    second.main()
    assert set(state.stream["returned"]) <= set(second.trained_rows())
