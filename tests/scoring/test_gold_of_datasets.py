r"""Every reference answer of GSM8K and MATH, found in its solution, is recognised when a completion repeats it."""

import json
from pathlib import Path

import pytest

from pods_cluster.scoring.builtin import math_answer
from pods_cluster.scoring.final_answer import gold_answer, parse_number

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def rows(name: str, column: str) -> list[str]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no data set at {path}")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)[column] for line in lines]


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k(split):
    solutions = rows(f"gsm8k/{split}.jsonl", "answer")
    wrong = []
    for solution in solutions:
        gold = gold_answer(solution)
        number = parse_number(gold)
        assert number is not None, solution
        right = (
            f"#### {gold}",
            f"so \\boxed{{{gold}}}.",
            f"<answer>${gold}</answer>",
            f"She has {gold} left.",
            solution,
        )
        wrong += [text for text in right if math_answer(text, solution) != 1.0]
        wrong += [text for text in (f"#### {number + 1}", "nothing") if math_answer(text, solution) != 0.0]
    assert not wrong


def test_math():
    wrong = []
    for solution in rows("math/problems.jsonl", "solution"):
        gold = gold_answer(solution)
        assert gold.count("{") == gold.count("}"), solution
        respelled = gold.replace("\\frac{", "\\dfrac{").replace(",", ", ")
        right = (
            f"thus $\\boxed{{{gold}}}$.",
            f"<answer>${gold}$</answer>",
            f"The final answer is ${gold}$.",
            f"\\boxed{{ {respelled} }}",
            solution,
        )
        wrong += [text for text in right if math_answer(text, solution) != 1.0]
    assert not wrong


def test_math_answers_of_other_problems_are_wrong():
    golds = list(dict.fromkeys(gold_answer(solution) for solution in rows("math/problems.jsonl", "solution")[:150]))
    numbers = [parse_number(gold) for gold in golds]
    wrong = []
    for i, gold in enumerate(golds[:-1]):
        other = golds[i + 1]
        same_number = numbers[i] is not None and numbers[i] == numbers[i + 1]
        if not same_number and math_answer(f"\\boxed{{{other}}}", gold) != 0.0:
            wrong.append((gold, other))
    assert not wrong
