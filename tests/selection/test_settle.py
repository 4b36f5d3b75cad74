"""Settling against brute force: settled exactly when no further reward in the range can raise the kept variance."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.selection.settle import after_wave, is_settled, plan_waves
from tests.law import law

GRADES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def best(rewards: list[float], m: int) -> float:
    return max(np.var(subset) for subset in combinations(rewards, m)) if len(rewards) >= m else -1.0


@law(200)
@given(st.lists(GRADES, min_size=0, max_size=8), st.integers(2, 5))
def test_settled_exactly_when_one_more_reward_cannot_help(rewards: list[float], m: int) -> None:
    if len(rewards) < m:
        assert not is_settled(rewards, m, 0.0, 1.0)
        return
    gains = any(best([*rewards, more], m) > best(rewards, m) + 1e-12 for more in (0.0, 1.0, 0.25, 0.5, 0.9))
    assert is_settled(rewards, m, 0.0, 1.0) == (not gains)


@law(80)
@given(st.lists(st.sampled_from([0.0, 1.0]), max_size=7), st.lists(GRADES, min_size=1, max_size=3), st.integers(2, 5))
def test_once_settled_no_further_rewards_help(rewards: list[float], more: list[float], m: int) -> None:
    if is_settled(rewards, m, 0.0, 1.0):
        assert best(rewards + more, m) == pytest.approx(best(rewards, m))


@law(150)
@given(st.lists(st.floats(-1, 2), min_size=2, max_size=8), st.integers(2, 5), st.floats(0, 1.4))
def test_tolerance_bounds_what_is_given_up(rewards: list[float], m: int, tolerance: float) -> None:
    if is_settled(rewards, m, -1.0, 2.0, tolerance):
        greatest = 9.0 * (m // 2) * ((m + 1) // 2) / m**2
        assert best(rewards, m) >= (1 - 2 * tolerance / 3.0) ** 2 * greatest - 1e-7


def test_unusable_rewards_do_not_settle_a_group() -> None:
    assert not is_settled([np.nan, np.inf, 1.0, np.nan], 2, 0.0, 1.0)
    assert is_settled([np.nan, 0.0, 1.0], 2, 0.0, 1.0)
    assert not is_settled([], 2, 0.0, 1.0)
    assert is_settled([0.1 + 0.1 + 1.0, 0.0], 2, 0.0, 1.2)  # a rounded sum lies at its end


def test_odd_m_needs_the_extra_one_at_either_end() -> None:
    assert is_settled([0.0, 0.0, 1.0], 3, 0.0, 1.0)
    assert is_settled([0.0, 1.0, 1.0], 3, 0.0, 1.0)
    assert not is_settled([0.0, 1.0, 0.5], 3, 0.0, 1.0)


def test_a_range_that_cannot_hold_is_refused() -> None:
    for low, high in ((1.0, 1.0), (1.0, 0.0), (0.0, np.inf), (np.nan, 1.0)):
        with pytest.raises(ValueError, match="reward range"):
            is_settled([0.0], 2, low, high)
    with pytest.raises(ValueError, match=r"selector\.tolerance"):
        is_settled([0.0], 2, 0.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="outside its declared range"):
        is_settled([1.5], 2, 0.0, 1.0)


@law(200)
@given(st.integers(2, 300), st.integers(1, 20), st.data())
def test_waves_cover_n_and_the_first_can_settle(n: int, waves: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(2, n))
    portions = plan_waves(n, m, waves)
    assert sum(portions) == n
    assert len(portions) <= waves
    assert portions[0] >= m
    assert min(portions) >= 1
    assert max(portions[1:], default=1) - min(portions[1:], default=1) <= 1


@law(100)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=8, max_size=8), st.integers(2, 6), st.integers(1, 4))
def test_waves_stop_at_the_first_portion_that_settles(rewards: list[float], m: int, waves: int) -> None:
    portions = plan_waves(8, m, waves)
    issued = 0
    for portion in portions:
        issued += portion
        decision = after_wave(portions, issued, rewards[:issued], m, 0.0, 1.0)
        if decision.issue == 0:
            break
        assert not is_settled(rewards[:issued], m, 0.0, 1.0)
    assert issued == 8 or decision.settled
    assert best(rewards[:issued], m) == pytest.approx(best(rewards, m))


def test_waves_refuse_half_a_portion() -> None:
    with pytest.raises(ValueError, match="not the end of a portion"):
        after_wave((4, 2, 2), 5, [0.0] * 5, 2, 0.0, 1.0)
    with pytest.raises(ValueError, match="wait for the portion"):
        after_wave((4, 2, 2), 4, [0.0] * 3, 2, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"selector\.keep"):
        plan_waves(4, 5, 2)
    with pytest.raises(ValueError, match=r"selector\.waves"):
        plan_waves(4, 2, 0)
