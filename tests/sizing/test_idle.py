"""Idle shares: tokens a second of each pool against the best that it has kept up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.sizing.idle import IdleShare
from pods_cluster.sizing.step_measurement import StepMeasurement

STEP = StepMeasurement(seconds=10.0, update_seconds=4.0, trained_tokens=2000, generator_rate=600.0)


def test_shares_by_hand() -> None:
    values = IdleShare().after_step(replace(STEP, best_generator_rate=800.0))
    assert values == {
        "generator/tokens_per_second": 600.0,
        "generator/saturated_tokens_per_second": 800.0,
        "learner/tokens_per_second": 500.0,
        "learner/saturated_tokens_per_second": 500.0,
        "generator/idle_share": 0.25,
        "learner/idle_share": 0.6,
    }


def test_a_share_is_left_out_while_no_rate_is_known() -> None:
    assert "generator/idle_share" not in IdleShare().after_step(STEP)
    assert "learner/idle_share" not in IdleShare().after_step(StepMeasurement(seconds=1.0))


def test_the_learners_rate_is_the_best_so_far_and_follows_its_ranks() -> None:
    share = IdleShare()
    share.after_step(STEP)
    slow = share.after_step(replace(STEP, update_seconds=8.0))
    assert slow["learner/saturated_tokens_per_second"] == 500.0
    doubled = share.after_step(replace(STEP, update_seconds=8.0, ranks=2))
    assert doubled["learner/saturated_tokens_per_second"] == 1000.0
    assert doubled["learner/idle_share"] == pytest.approx(0.8)


@given(st.floats(0, 1e6), st.floats(0.1, 1e6), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e6))
def test_shares_are_shares(rate: float, best: float, seconds: float, update: float, tokens: float) -> None:
    step = StepMeasurement(
        seconds=seconds, update_seconds=update, trained_tokens=tokens, generator_rate=rate, best_generator_rate=best
    )
    values = IdleShare().after_step(step)
    assert all(0.0 <= value <= 1.0 for name, value in values.items() if name.endswith("idle_share"))
