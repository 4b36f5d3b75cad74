"""A reward's range has one tolerance, in the scorer and in the settled condition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.scoring.reward_range import into_range, range_slack
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_main import _read_value
from pods_cluster.selection.settle import is_settled

ENDS = st.floats(-1e6, 1e6, allow_subnormal=False)


@pytest.mark.parametrize(
    ("value", "low", "high", "wanted"),
    [
        (np.float32(1.1), 0, 1.1, 1.1),
        (0.3000000005, 0, 0.3, 0.3),
        (np.float16(0.1), 0.1, 1, None),
        (-1e-9, 0, 1, 0),
        (10.00001, 1, 10, 10),
        (10.1, 1, 10, None),
        (-0.5000001, -0.5, 0, -0.5),
        (0.5, 0, 1, 0.5),
        (1000.0009, 0, 1000, 1000),
        (1000.002, 0, 1000, None),
    ],
)
def test_rounding_is_no_failure_and_more_is_one(value: float, low: float, high: float, wanted: float | None) -> None:
    assert into_range(float(value), low, high) == wanted
    number, kind, text = _read_value(value, (low, high))
    assert number == wanted
    assert kind is (None if wanted is not None else FailureKind.RANGE)
    assert bool(text) == (wanted is None)


@given(ENDS, ENDS, st.floats(-2e6, 2e6))
def test_what_the_scorer_passes_the_settled_condition_takes(a: float, b: float, value: float) -> None:
    low, high = min(a, b), max(a, b)
    if high - low <= 4 * range_slack(low, high) or not math.isfinite(high - low):
        return
    found = into_range(value, low, high)
    if found is None:
        with pytest.raises(ValueError, match="outside its declared range"):
            is_settled([value], 2, low, high)
    else:
        assert low <= found <= high
        is_settled([value, found], 2, low, high)
        assert is_settled([low, high], 2, low, high)
