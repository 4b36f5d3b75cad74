from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.dashboard.columns import MAX_METRICS, Columns, plain
from pods_cluster.telemetry.step_record import merge_steps
from tests.law import law


def filled(steps: int, **metrics: list[float]) -> Columns:
    columns = Columns()
    for step in range(steps):
        columns.put({"step": step, **{name: values[step] for name, values in metrics.items()}})
    return columns


def test_a_step_told_in_parts_is_one_row() -> None:
    columns = Columns()
    columns.put({"step": 1, "loss": 0.5})
    columns.put({"step": 2, "loss": 0.25})
    columns.put({"step": 2, "eval/greedy_accuracy": 0.75, "loss": 0.125})
    assert columns.rows == 2
    assert columns.record() == {"step": 2, "loss": 0.125, "eval/greedy_accuracy": 0.75}


def test_steps_out_of_order_find_their_place() -> None:
    columns = Columns()
    for step in (5, 1, 3):
        columns.put({"step": step, "loss": float(step)})
    assert columns.steps.tolist() == [1, 3, 5]
    found = columns.column("loss")
    assert found is not None
    assert found.tolist() == [1, 3, 5]


def test_taking_back_leaves_nothing_behind() -> None:
    columns = Columns()
    for step in range(10):
        columns.put({"step": step, "loss": 1.0, "kl": 2.0, "nonfinite": {"grad_norm": "nan"} if step % 2 else {}})
    columns.take_back(4)
    columns.put({"step": 5, "loss": 3.0})
    assert columns.record() == {"step": 5, "loss": 3.0}, "kl of the old step 5 must be gone"
    assert columns.nonfinite == {"grad_norm": [1, 3]}


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.dictionaries(st.sampled_from("abc"), st.integers(-1000, 1000), max_size=3)),
        max_size=60,
    )
)
@law(60)
def test_rows_are_what_merging_all_lines_gives(lines: list[tuple[int, dict[str, int]]]) -> None:
    records = [{"step": step, **values} for step, values in lines]
    columns = Columns()
    for record in records:
        columns.put(record)
    assert [columns.record(row) for row in range(columns.rows)] == merge_steps(records)


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-100, 100)), min_size=1, max_size=300),
    points=st.integers(2, 40),
    start=st.integers(0, 300),
    length=st.integers(0, 300),
)
@law(80)
def test_buckets_hold_the_mean_and_extremes_of_their_rows(
    values: list[int | None], points: int, start: int, length: int
) -> None:
    columns = Columns()
    for step, value in enumerate(values):
        columns.put({"step": step} if value is None else {"step": step, "v": value})
    found = columns.curves(["v"], start=start, end=start + length, points=points)
    curve = found.curves["v"]
    inside = values[start : start + length + 1]
    assert found.rows == len(inside)
    assert len(curve.mean) == len(found.x) <= points
    if not inside:
        return
    step = start
    for index, mean in enumerate(curve.mean):
        end = min((step // found.bucket + 1) * found.bucket, start + len(inside))
        there = [value for value in values[step:end] if value is not None]
        assert found.x[index] == pytest.approx(sum(range(step, end)) / (end - step))
        if not there:
            assert math.isnan(mean)
        else:
            assert mean == pytest.approx(sum(there) / len(there), abs=1e-4)
            if curve.low is not None and curve.high is not None:
                assert (curve.low[index], curve.high[index]) == (min(there), max(there))
        step = end
    assert step == start + len(inside)


def test_new_rows_change_the_last_bucket_alone() -> None:
    values = [float(step % 7) for step in range(1000)]
    short = filled(990, v=values).curves(["v"], points=100)
    long = filled(1000, v=values).curves(["v"], points=100)
    assert short.bucket == long.bucket == 16
    assert np.array_equal(short.curves["v"].mean[:-1], long.curves["v"].mean[: len(short.curves["v"].mean) - 1])


def test_values_too_large_for_a_column_are_no_values() -> None:
    columns = Columns()
    with np.errstate(over="ignore"):
        columns.put({"step": 1, "huge": 10**400, "large": 1e300, "true": True})
    assert columns.record() == {"step": 1, "true": 1.0}
    assert plain(columns.curves(["huge", "large"], points=10).curves["large"].mean) == [None]


def test_metrics_are_bounded_in_number_and_name() -> None:
    columns = Columns()
    columns.put({"step": 1, **{f"m{index}": 1 for index in range(MAX_METRICS + 5)}})
    columns.put({"step": 2, "x" * 301: 1, "bad\ud800": 1})
    assert len(columns.names) == MAX_METRICS
    assert columns.left_out == 7


@pytest.mark.parametrize("record", [{}, {"step": None}, {"step": -1}, {"step": "1"}, {"step": 1.5}, {"step": 2**70}])
def test_a_line_without_a_step_is_no_row(record: dict[str, object]) -> None:
    columns = Columns()
    assert columns.put(record) is None
    assert columns.rows == 0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_keeps_six_digits(value: float) -> None:
    rounded = plain(np.array([value]))[0]
    assert rounded is not None
    assert rounded == pytest.approx(value, rel=6e-6, abs=1e-300)
