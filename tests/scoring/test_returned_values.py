"""Whatever a reward returns becomes one number or one named failure for each completion, and never a 0 in place of one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import RewardConfig
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_main import read_results
from tests.law import law

OPEN = RewardConfig(name="rewards.py:any")
BOUNDED = RewardConfig(name="rewards.py:any", range=(0.0, 1.0))
ODD = [None, True, 0, -0.0, 10**400, "1", b"1", 1j, object(), [1.0], (), float("nan"), float("inf"), -1e308, Decimal("0.5"),
       Decimal("NaN"), Fraction(1, 3), date(2024, 1, 1), np.float32(0.1), np.bool_(True), np.array([]), np.array([0.5, 1.0]),
       np.array(0.5)]  # fmt: skip
VALUES = st.sampled_from(ODD) | st.floats()


@given(st.lists(VALUES, max_size=5), st.integers(0, 5), st.sampled_from([list, tuple, deque]), st.booleans())
@law(60)
def test_each_completion_has_a_number_or_a_cause(values: list[Any], count: int, kind: Any, bounded: bool) -> None:
    results = read_results(kind(values), BOUNDED if bounded else OPEN, count)
    assert len(results) == count
    for place, (number, failure, message) in enumerate(results):
        assert (number is None) == (failure is not None) == bool(message)
        if number is not None:
            assert math.isfinite(number)
            assert number == pytest.approx(float(values[place]), abs=2e-6)
            assert not bounded or 0 <= number <= 1
        if len(values) != count:
            assert failure is FailureKind.LENGTH


class Says(list[float]):
    """A list that says another length than it has."""

    def __len__(self) -> int:
        return 2


class Endless:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[float]:
        while True:
            yield 1.0


@pytest.mark.parametrize("raw", [Says([]), Says([1.0]), Says([1.0] * 3), Endless()])
def test_a_list_that_lies_about_its_length_is_a_failure(raw: Any) -> None:
    results = read_results(raw, OPEN, 2)
    assert [failure for _, failure, _ in results] == [FailureKind.LENGTH] * 2


@pytest.mark.parametrize(
    "raw",
    [{"score": 1.0}, {0: "x", 1: "y"}, {0.0, 1.0}, frozenset({1, 2}), {0: 1}.keys(), "ab", b"ab", bytearray(b"ab"), None, 1.0,
     True, np.float64(1.0), iter([1.0, 2.0]), (number for number in (1.0, 2.0)), map(float, [1, 2]), object()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_list_is_a_failure_with_what_was_returned(raw: Any) -> None:
    """Sets and mappings have no order, so that their items belong to no completion."""
    for number, failure, message in read_results(raw, OPEN, 2):
        assert number is None
        assert failure is FailureKind.ERROR
        assert "expected a list of 2 numbers or None" in message
