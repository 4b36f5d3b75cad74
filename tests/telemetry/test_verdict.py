"""The sentence on two runs is true to their numbers: which is ahead, whether by more than chance, and what time it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.telemetry.curves import CurveError, RunSeries
from pods_cluster.telemetry.verdict import verdict


def series(name: str, shares: dict[int, float], *, seconds: float, rows: int = 512) -> RunSeries:
    """A run that was evaluated at these steps, each step of so many seconds."""
    records = [
        {"step": step, "elapsed": seconds * step, "eval/greedy_accuracy": share, "eval/rows": rows}
        for step, share in shares.items()
    ]
    return RunSeries.of(name, records, {})


def test_the_first_is_ahead_and_took_longer() -> None:
    text = verdict("PODS", series("p", {0: 0.4, 60: 0.7, 120: 0.8, 180: 0.9}, seconds=2), "GRPO",
                   series("g", {0: 0.4, 60: 0.5, 120: 0.6, 180: 0.7}, seconds=1))  # fmt: skip
    assert text == (
        "After 180 updates PODS has 90.0 % of 512 held-out rows right and GRPO 70.0 %: +20.0 points (± 4.7), more than "
        "chance between the rows, one seed each. GRPO took 3:00 min, PODS 6:00 min, of which in the first 3:00 min it "
        "came to 70.0 %."
    )


def test_the_first_is_behind_by_no_more_than_chance() -> None:
    text = verdict(
        "PODS", series("p", {10: 0.50}, seconds=1, rows=100), "GRPO", series("g", {10: 0.55}, seconds=2, rows=100)
    )
    assert "-5.0 points (± 13.8), within chance between the rows" in text
    assert text.endswith("PODS took 10 s, GRPO 20 s.")


def test_runs_of_different_length_are_compared_where_both_were_evaluated() -> None:
    text = verdict(
        "a", series("a", {0: 0.1, 20: 0.5, 40: 0.9}, seconds=1), "b", series("b", {0: 0.1, 20: 0.4, 30: 0.6}, seconds=1)
    )
    assert text.startswith("After 20 updates a has 50.0 %")
    with pytest.raises(CurveError, match="no step after the first at which both were evaluated"):
        verdict("a", series("a", {0: 0.1, 20: 0.5}, seconds=1), "b", series("b", {0: 0.1, 30: 0.5}, seconds=1))
    with pytest.raises(CurveError, match="no step has the metric"):
        verdict("a", RunSeries.of("a", [], {}), "b", series("b", {0: 0.1}, seconds=1))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 2000))
def test_a_difference_and_its_reverse_say_the_same(a: float, b: float, rows: int) -> None:
    one, other = series("a", {5: a}, seconds=1, rows=rows), series("b", {5: b}, seconds=1, rows=rows)
    forth, back = verdict("a", one, "b", other), verdict("b", other, "a", one)
    assert ("more than chance" in forth) == ("more than chance" in back)
    if a == b:
        assert "within chance" in forth
