"""Evaluation: what each held-out row came to, kept beside the means; and the stop after a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from pods_cluster.config.run_settings import EvalConfig
from pods_cluster.generation.messages import EvalRow, EvalSample
from pods_cluster.run.evaluation import evaluate
from pods_cluster.run.loop import Run
from pods_cluster.run.step_numbers import StageClock
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.types import Prompt, SamplingParams
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config

PROMPTS = [Prompt(0, row, f"row {row}", (1, 2)) for row in range(4)]


class Answers:
    """A pool that knows what it will answer: greedy rewards by row, sampled ones by row and index."""

    def __init__(self, greedy: Sequence[float | None], sampled: Sequence[Sequence[float | None]]) -> None:
        self.greedy, self.sampled, self.version = greedy, sampled, 7

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]:
        rewards = [[value] for value in self.greedy] if sampling.temperature == 0 else self.sampled
        return [
            EvalRow(
                prompt.epoch,
                prompt.row,
                self.version,
                tuple(EvalSample("text", value, {"exact_match": value}, 5 + prompt.row, False) for value in values),
            )
            for prompt, values in zip(prompts, rewards, strict=True)
        ]


def test_every_row_is_told_and_the_means_are_theirs() -> None:
    config = loop_config("data.eval={split: test}", "run.eval={every: 1, samples: 2}")
    pool = Answers([1.0, 0.0, None, 1.0], [[1.0, 0.0], [0.0, 0.0], [None, 1.0], [1.0, 1.0]])
    report = asyncio.run(evaluate(cast(Any, pool), PROMPTS, config))
    assert [row["greedy"] for row in report.rows] == [True, False, None, True]
    assert [row["sampled"] for row in report.rows] == [[True, False], [False, False], [None, True], [True, True]]
    assert [(row["row"], row["version"], row["tokens"]) for row in report.rows] == [(r, 7, 5 + r) for r in range(4)]
    assert report.values["eval/greedy_accuracy"] == pytest.approx(2 / 3)
    assert report.values["eval/failed"] == 1
    assert report.values["eval/pass_at_k"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("reward", "values", "right"),
    [
        (
            "{name: my.py:scaled, label: exact_match, range: [1, 10]}",
            [10.0, 1.0, 9.999999, 9.0],
            [True, False, True, False],
        ),
        (
            "{name: my.py:scaled, label: exact_match, range: [0, 0.5]}",
            [0.5, 0.0, 0.25, None],
            [True, False, False, None],
        ),
        (
            "{name: my.py:penalty, label: exact_match, range: [-1, 0]}",
            [0.0, -1.0, -0.5, 0.0],
            [True, False, False, True],
        ),
        ("{name: my.py:free, label: exact_match}", [1.0, 0.9, 3.0, 0.0], [True, False, True, False]),
        ("{name: exact_match}", [1.0, 0.0, 1.0, 0.0], [True, False, True, False]),
    ],
)
def test_correct_is_the_top_of_the_rewards_range(
    reward: str, values: list[float | None], right: list[bool | None]
) -> None:
    config = loop_config("data.eval={split: test}", "run.eval={every: 1, samples: 0}", f"reward=[{reward}]")
    report = asyncio.run(evaluate(cast(Any, Answers(values, [])), PROMPTS, config))
    assert [row["greedy"] for row in report.rows] == right
    known = [flag for flag in right if flag is not None]
    assert report.values["eval/greedy_accuracy"] == pytest.approx(sum(known) / len(known))


class Judged(Loop):
    """The loop with held-out rows, of which one more is right after each step."""

    def __init__(self, tmp_path: Path, *overrides: str) -> None:
        super().__init__(
            loop_config("data.eval={split: test}", "run.eval={every: 2, samples: 0}", *overrides), tmp_path
        )
        self.run.held_out = list(PROMPTS)

        async def answer(prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]:
            right = [float(row < self.run.version) for row in range(4)]
            return await Answers(right, []).evaluate(prompts, sampling, samples)

        self.pool.evaluate = answer  # type: ignore[method-assign]


def test_a_runs_folder_holds_the_rows_of_each_evaluation(tmp_path: Path) -> None:
    loop = Judged(tmp_path)
    loop.main()
    found: dict[int, list[bool]] = {}
    for row in loop.folder.read_evals():
        found.setdefault(row["step"], []).append(row["greedy"])
    assert found == {0: [False] * 4, 2: [True, True, False, False], 3: [True, True, True, False]}
    records = {record["step"]: record for record in loop.folder.read_metrics()}
    assert {step: record.get("eval/greedy_accuracy") for step, record in records.items()} == {
        0: 0.0,
        1: None,
        2: 0.5,
        3: 0.75,
    }


def test_rows_that_a_resume_takes_back_do_not_stand(tmp_path: Path) -> None:
    loop = Judged(tmp_path)
    loop.main()
    with Recorder.for_run(loop.folder, resumed_from=2, strict=True):
        pass
    assert {row["step"] for row in loop.folder.read_evals()} == {0, 2}


def test_the_step_that_uses_up_the_time_is_evaluated(tmp_path: Path) -> None:
    loop = Judged(
        tmp_path, "run.steps=50", "run.max_seconds=1e-9"
    )  # any step takes longer; every second one is evaluated
    loop.main()
    assert loop.run.step == 1
    records = {record["step"]: record for record in loop.folder.read_metrics()}
    assert records[1]["eval/greedy_accuracy"] is not None


def test_runs_are_evaluated_at_fixed_times_of_training() -> None:
    settings = EvalConfig(every=0, minutes=0.5)
    ends = [0.0, 12.0, 29.9, 30.0, 45.0, 59.0, 95.0, 96.0]
    due = [settings.is_due(step, *reversed(pair)) for step, pair in enumerate(itertools.pairwise(ends), 1)]
    # the first step that ends at or after 30 s; the long one that passed 60 and 90 s
    assert due == [False, False, True, False, False, True, False]
    assert not EvalConfig(every=0).on
    assert EvalConfig(every=0, minutes=0.5).on
    both = EvalConfig(every=4, minutes=0.5)
    assert [both.is_due(step, 20.0, 10.0) for step in (3, 4)] == [False, True]


def test_a_loop_evaluates_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Judged(tmp_path, "run.eval={every: 0, minutes: 1, samples: 0}", "run.steps=6")
    monkeypatch.setattr(StageClock, "total", lambda clock: 25.0)  # seconds of each step
    loop.main()
    assert sorted({row["step"] for row in loop.folder.read_evals()}) == [0, 3, 5, 6]


def test_a_run_ends_when_its_time_is_up_with_an_evaluation_and_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Judged(tmp_path, "run.steps=50", "run.max_seconds=1e7")
    before = Run._one_step

    async def one_step(run: Run) -> None:
        if run.step == 4:
            run.seconds = 2e7  # a long step
        await before(run)

    monkeypatch.setattr(Run, "_one_step", one_step)
    loop.main()
    assert loop.run.step == 5
    records = {record["step"]: record for record in loop.folder.read_metrics()}
    assert records[5]["eval/greedy_accuracy"] == 1.0
    state = loop.run.state()
    assert state.seconds >= 2e7
    assert (loop.folder.checkpoints / "step-5").is_dir() or list(loop.folder.checkpoints.iterdir())
