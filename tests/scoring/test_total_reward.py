"""The total: a weighted sum that is missing rather than wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.scoring import combine, total_range
from tests.scoring.support import reward

TWO = [reward("math_answer"), reward("think_answer_format", weight=0.1)]


def test_weighted_sum():
    assert combine(TWO, {"math_answer": 1.0, "think_answer_format": 0.5}) == pytest.approx(1.05)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_missing_part_makes_the_total_missing(bad):
    assert combine(TWO, {"math_answer": 1.0, "think_answer_format": bad}) is None
    assert combine(TWO, {"math_answer": 1.0}) is None


def test_a_part_of_weight_zero_never_matters():
    specs = [reward("math_answer"), reward("m:watched", weight=0.0)]
    assert combine(specs, {"math_answer": 1.0, "watched": None}, {"watched"}) == 1.0
    assert total_range(specs) == (0.0, 1.0)


def test_skip_leaves_a_part_out_unless_it_failed():
    specs = [reward("math_answer"), reward("m:sometimes", none="skip", range=(1.0, 2.0))]
    assert combine(specs, {"math_answer": 1.0, "sometimes": None}) == 1.0
    assert combine(specs, {"math_answer": 1.0, "sometimes": None}, {"sometimes"}) is None
    assert combine(specs[1:], {"sometimes": None}) is None
    assert total_range(specs) == (0.0, 3.0)


def test_a_range_that_is_not_declared_is_not_known():
    assert total_range(TWO) == pytest.approx((0.0, 1.1))
    assert total_range([*TWO, reward("m:mine")]) is None
    assert total_range([*TWO, reward("m:mine", weight=-2.0, range=(-1.0, 3.0))]) == pytest.approx((-6.0, 3.1))


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 1), st.booleans()), min_size=1, max_size=6),
)
def test_a_total_lies_in_the_total_range(entries):
    specs = [
        reward(f"m:r{i}", weight=weight, range=(-0.5, 1.0), none="skip" if skip else "missing")
        for i, (weight, _, skip) in enumerate(entries)
    ]
    parts = {f"r{i}": None if skip and value < 0.3 else value for i, (_, value, skip) in enumerate(entries)}
    total, ends = combine(specs, parts), total_range(specs)
    assert ends is not None
    if total is not None:
        assert ends[0] - 1e-9 <= total <= ends[1] + 1e-9
