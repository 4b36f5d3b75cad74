"""The quickstart's task: two-digit addition, written as a person would write it (`47+38=` -> `85`).

The three splits share no problem: a+b and b+a are one problem, and both of its spellings are in the same split. So
accuracy on the test split is accuracy on sums that the model has never seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SMALLEST = 10
LARGEST = 99
ALPHABET = "0123456789+="

Problem = tuple[int, int]
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows of the three splits: `warm` for the supervised warm start, `train` for RL, `test` held out of both."""

    warm: list[Row]
    train: list[Row]
    test: list[Row]

    def as_dict(self) -> dict[str, list[Row]]:
        """Return the rows by the name of their split."""
        return {"warm": self.warm, "train": self.train, "test": self.test}


def problems() -> list[Problem]:
    """Return every unordered pair of two-digit numbers, the smaller first: 4,095 problems."""
    return [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]


def row(a: int, b: int) -> Row:
    """Return one dataset row: the prompt, and the answer that a completion must equal."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def problem_of(a_row: Row) -> Problem:
    """Return the unordered problem of a row."""
    a, b = sorted(int(part) for part in a_row["prompt"].rstrip("=").split("+"))
    return a, b


def make_splits(seed: int, test: int = 512, warm: int = 2048) -> Splits:
    """Split all problems into `warm` and `test` ones (counts) and the rest for RL; the same for the same seed.

    Warm-start and RL rows hold both spellings of each problem, test rows one at random, so that an accuracy is a mean
    over independent problems. Raises ValueError when no problem is left for RL.
    """
    rng = random.Random(seed)
    shuffled = problems()
    if min(test, warm) < 1 or test + warm >= len(shuffled):
        raise ValueError(
            f"test={test} and warm={warm} must each be at least 1 and leave some of {len(shuffled)} for RL"
        )
    rng.shuffle(shuffled)
    test_rows = [row(*(pair if rng.random() < 0.5 else pair[::-1])) for pair in shuffled[:test]]
    return Splits(
        warm=_both_spellings(shuffled[test : test + warm], rng),
        train=_both_spellings(shuffled[test + warm :], rng),
        test=test_rows,
    )


def _both_spellings(pairs: Iterable[Problem], rng: random.Random) -> list[Row]:
    spelled = {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}
    rows = [row(a, b) for a, b in sorted(spelled)]
    rng.shuffle(rows)
    return rows


def write_jsonl(rows: Iterable[Row], path: Path) -> None:
    """Write one JSON object a line, in the given order."""
    path.write_text("".join(json.dumps(item) + "\n" for item in rows), encoding="utf-8")
