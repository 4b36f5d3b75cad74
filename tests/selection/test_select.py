"""One group through `select`: exclusions, the floor, the signal, the statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.selection.select import moments, select
from pods_cluster.types import Fate, GroupId
from tests.law import law

GROUP = GroupId(1, 2, 3)


def test_unusable_rewards_are_excluded_first_and_counted_apart() -> None:
    rewards = [None, 1.0, math.nan, 0.0, math.inf, -math.inf, 1.0, 0.0, None]
    outcome = select(rewards, 2, "max_variance", 0, GROUP)
    assert (outcome.n, outcome.n_valid, outcome.n_missing, outcome.n_nan, outcome.n_infinite) == (9, 4, 2, 1, 2)
    assert outcome.n_excluded == 5
    assert outcome.fate is None
    assert set(outcome.kept.tolist()) <= {1, 3, 6, 7}
    assert sorted(np.array([0, 1, 0, 0, 0, 0, 1, 0, 0])[outcome.kept]) == [0, 1]


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "min_reward", "random", "percentile"])
@law(40)
@given(
    rewards=st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=30),
    m=st.integers(2, 8),
)
def test_no_unusable_reward_is_ever_kept(rule: str, rewards: list[float | None], m: int) -> None:
    outcome = select(rewards, m, rule, 3, GROUP)
    valid = [i for i, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    assert outcome.n_valid == len(valid)
    assert outcome.n_valid + outcome.n_missing + outcome.n_nan + outcome.n_infinite == len(rewards)
    assert set(outcome.kept.tolist()) <= set(valid)
    if outcome.fate is Fate.TOO_FEW_VALID:
        assert len(valid) < m
        assert len(outcome.kept) == 0
    else:
        assert len(outcome.kept) == m


def test_excluded_rewards_do_not_change_who_is_kept_by_value() -> None:
    clean = np.random.default_rng(0).random(20)
    holed = np.insert(clean, [3, 9], [math.nan, math.inf])
    kept, with_holes = select(clean, 6, "max_variance", 0, GROUP), select(holed, 6, "max_variance", 0, GROUP)
    np.testing.assert_array_equal(np.sort(clean[kept.kept]), np.sort(holed[with_holes.kept]))


def test_with_fewer_than_m_valid_all_are_kept_from_the_floor_on() -> None:
    rewards = [1.0, math.nan, 0.0, 0.5]
    assert select(rewards, 4, "max_variance", 0, GROUP).fate is Fate.TOO_FEW_VALID
    assert select(rewards, 4, "max_variance", 0, GROUP, min_valid=3).kept.tolist() == [0, 2, 3]
    refused = select(rewards, 4, "max_variance", 0, GROUP, min_valid=4)
    assert refused.fate is Fate.TOO_FEW_VALID
    assert refused.group_mean == pytest.approx(0.5)
    assert select([None, None], 2, "random", 0, GROUP, min_valid=1).fate is Fate.TOO_FEW_VALID
    assert select([], 2, "random", 0, GROUP, min_valid=1).fate is Fate.TOO_FEW_VALID


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "min_reward", "random", "percentile"])
@law(20)
@given(
    reward=st.floats(-1e6, 1e6), count=st.integers(2, 30), m=st.integers(2, 8), failed=st.lists(st.integers(0, 29), max_size=9),
    other=st.floats(1e-6, 1e3), scope=st.sampled_from(["kept", "group"]),
)  # fmt: skip
def test_a_group_without_spread_has_no_signal_whatever_its_mean(
    rule: str, reward: float, count: int, m: int, failed: list[int], other: float, scope: Any
) -> None:
    """Equal rewards of any size, 0.37 as well as 0 and 1, also beside rollouts without a reward; and one other is a signal."""
    rewards: list[float | None] = [None if at in failed else reward for at in range(count)]
    outcome = select(rewards, m, rule, 3, GROUP, no_signal_scope=scope)
    assert outcome.fate is (Fate.TOO_FEW_VALID if outcome.n_valid < m else Fate.NO_SIGNAL)
    if outcome.n_valid > m and rule == "max_variance":
        rewards[next(at for at, value in enumerate(rewards) if value is not None)] = reward + other
        assert select(rewards, m, rule, 3, GROUP, no_signal_scope=scope).fate is None


def test_no_signal_is_judged_on_the_kept_set_or_the_group() -> None:
    rewards = np.array([1.0, 1.0, 1.0, 0.0])
    kept = select(rewards, 2, "max_reward", 0, GROUP)
    assert kept.fate is Fate.NO_SIGNAL
    assert len(kept.kept) == 2
    assert kept.kept_mean == 1.0
    assert select(rewards, 2, "max_reward", 0, GROUP, no_signal_scope="group").fate is None
    assert select(np.ones(4), 2, "max_variance", 0, GROUP, no_signal_scope="group").fate is Fate.NO_SIGNAL


@pytest.mark.parametrize(("spread", "fate"), [(0.9e-8, Fate.NO_SIGNAL), (1.1e-8, None), (1e-3, None)])
def test_the_spread_that_counts_as_none(spread: float, fate: Fate | None) -> None:
    assert select(np.array([0.0, spread, 0.0, spread]), 2, "max_variance", 0, GROUP).fate is fate


def test_statistics_are_sample_ones_over_all_valid_and_over_the_kept() -> None:
    rewards = np.random.default_rng(3).normal(size=64) + 1e4
    outcome = select(rewards, 16, "max_variance", 0, GROUP)
    assert outcome.group_mean == pytest.approx(rewards.mean())
    assert outcome.group_std == pytest.approx(rewards.std(ddof=1))
    assert outcome.kept_mean == pytest.approx(rewards[outcome.kept].mean())
    assert outcome.kept_std == pytest.approx(rewards[outcome.kept].std(ddof=1))
    assert outcome.spread == pytest.approx(np.ptp(rewards[outcome.kept]))


def test_moments_at_the_edges() -> None:
    assert moments(np.array([2.0])) == (2.0, 0.0, 0.0)
    assert math.isnan(moments(np.array([]))[0])
    mean, std, spread = moments(np.array([1e308, -1e308, 1.5e308]))
    assert mean == pytest.approx(5e307)
    assert math.isfinite(std)
    assert spread == math.inf


def test_the_outcome_depends_on_seed_and_group() -> None:
    rewards = np.ones(64)
    kept = {tuple(select(rewards, 16, "random", seed, GroupId(0, row)).kept) for seed in (0, 1) for row in (0, 1, 2)}
    assert len(kept) == 6
    again = [select(rewards, 16, "random", 0, GROUP).kept.tolist() for _ in range(3)]
    assert again[0] == again[1] == again[2]


@pytest.mark.parametrize("rewards", [["right"], [[1.0, 2.0]], [{"score": 1}]])
def test_rewards_that_are_no_numbers_are_refused_by_name(rewards) -> None:
    with pytest.raises(ValueError, match="rewards:"):
        select(rewards, 1, "random", 0, GROUP)


def test_integers_booleans_and_float32_are_rewards_too() -> None:
    for dtype in (np.int64, np.bool_, np.float32):
        outcome = select(np.array([0, 1, 1, 0], dtype=dtype), 2, "max_variance", 0, GROUP)
        assert outcome.spread == 1.0


def test_m_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"selector\.keep"):
        select([1.0], 0, "random", 0, GROUP)
