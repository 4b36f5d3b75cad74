"""The arithmetic task: right answers, the same for the same seed, and no problem in two splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pods_cluster.quickstart.task import make_splits, problem_of, problems, row, write_jsonl


def test_a_row_reads_like_arithmetic() -> None:
    assert row(47, 38) == {"prompt": "47+38=", "answer": "85"}
    assert problem_of(row(47, 38)) == problem_of(row(38, 47)) == (38, 47)


def test_every_answer_is_the_sum_of_its_prompt() -> None:
    for rows in make_splits(seed=0).as_dict().values():
        for item in rows:
            assert int(item["answer"]) == sum(problem_of(item))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_splits_are_disjoint_as_problems_and_cover_all(seed: int) -> None:
    splits = make_splits(seed)
    warm, train, test = ({problem_of(item) for item in rows} for rows in splits.as_dict().values())
    assert not warm & train
    assert not warm & test
    assert not train & test
    assert warm | train | test == set(problems())


def test_learned_splits_hold_both_spellings_once_and_test_holds_one() -> None:
    splits = make_splits(seed=0, test=100, warm=200)
    assert len(splits.test) == len({problem_of(item) for item in splits.test}) == 100
    for rows in (splits.warm, splits.train):
        prompts = {item["prompt"] for item in rows}
        assert len(prompts) == len(rows)
        assert all(f"{b}+{a}=" in prompts for a, b in (problem_of(item) for item in rows))


def test_splits_depend_on_the_seed_alone() -> None:
    assert make_splits(seed=3) == make_splits(seed=3)
    assert make_splits(seed=3) != make_splits(seed=4)


@pytest.mark.parametrize(("test", "warm"), [(0, 10), (10, 0), (4000, 95)])
def test_a_split_that_would_be_empty_is_refused(test: int, warm: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_splits(seed=0, test=test, warm=warm)


def test_jsonl_has_one_object_a_line(tmp_path: Path) -> None:
    rows = make_splits(seed=0).test[:5]
    write_jsonl(rows, tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
