"""The rules against their definitions: brute force over all subsets, laws, and fairness of the ties."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.selection import rules
from pods_cluster.selection.rule_registry import known_rules, resolve
from pods_cluster.selection.rules import RuleContext, group_rng
from pods_cluster.types import GroupId
from tests.law import law

GROUP = GroupId(0, 5, 0)
BUILT_IN = ("max_variance", "max_reward", "min_reward", "random", "percentile")
CONTEXT = RuleContext(GROUP, 0)


def choose(name: str, rewards, m: int, seed: int = 0, group: GroupId = GROUP) -> np.ndarray:
    indices, _ = resolve(name).choose(
        np.asarray(rewards, dtype=np.float64), m, group_rng(seed, group), RuleContext(group, seed)
    )
    return indices


def variance(values: np.ndarray) -> float:
    return float(np.var(values.astype(np.longdouble)))


def best_variance(rewards: np.ndarray, m: int) -> float:
    subsets = np.array(list(combinations(range(len(rewards)), m)))
    chosen = rewards.astype(np.longdouble)[subsets]
    return float(chosen.var(axis=1).max())


def families(n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "random": rng.normal(size=n),
        "uniform": rng.random(n),
        "binary": rng.integers(0, 2, n).astype(float),
        "one positive": np.eye(n)[rng.integers(n)],
        "tied": rng.integers(0, 3, n) / 2.0,
        "all equal": np.full(n, 0.7),
        "composite": rng.integers(0, 2, n) + 0.1 * rng.integers(0, 2, n) + 0.025 * rng.integers(0, 5, n),
        "offset 1e4, spread 1e-3": 1e4 + 1e-3 * rng.random(n),
        "offset 1e4, binary 1e-3": 1e4 + 1e-3 * rng.integers(0, 2, n),
        "tiny spread": 0.5 + 1e-9 * rng.random(n),
        "tiny": 1e-200 * rng.random(n),
        "subnormal": 5e-324 * rng.integers(0, 50, n),
        "huge": 1e308 * rng.uniform(-1.7, 1.7, n),
        "outlier": np.concatenate(([1e6], rng.random(n - 1))),
        "negative": -rng.random(n) * 3,
    }


@pytest.mark.parametrize("n", range(1, 10))
def test_max_variance_equals_brute_force(n: int) -> None:
    rng = np.random.default_rng(n)
    for name, rewards in families(n, rng).items():
        for m in range(1, n + 1):
            kept = choose("max_variance", rewards, m, seed=m)
            assert len(set(kept.tolist())) == m
            # compared on a scale where squares neither overflow nor vanish
            unit = (rewards.astype(np.longdouble) - rewards.min()) / max(float(np.max(np.abs(rewards))), 5e-324)
            assert variance(unit[kept]) == pytest.approx(best_variance(unit, m), rel=1e-10, abs=0), (name, m)


@law(150)
@given(
    st.lists(st.floats(-1e6, 1e6, allow_nan=False) | st.sampled_from([0.0, 1.0, 0.1, 1.1]), min_size=2, max_size=9),
    st.data(),
)
def test_max_variance_equals_brute_force_on_any_rewards(rewards: list[float], data: st.DataObject) -> None:
    values = np.array(rewards)
    m = data.draw(st.integers(2, len(values)))
    kept = choose("max_variance", values, m)
    assert variance(values[kept]) == pytest.approx(best_variance(values, m), rel=1e-9)


@law(60)
@given(st.integers(0, 64), st.integers(2, 64), st.integers(0, 5))
def test_binary_rewards_are_balanced_as_far_as_both_classes_reach(positives: int, m: int, seed: int) -> None:
    rewards = np.zeros(64)
    rewards[:positives] = 1.0
    kept_positives = int(rewards[choose("max_variance", rewards, m, seed)].sum())
    reachable = range(max(0, m - (64 - positives)), min(m, positives) + 1)
    distance = min(abs(2 * k - m) for k in reachable)
    assert abs(2 * kept_positives - m) == distance


def test_odd_m_with_binary_rewards_takes_either_side_equally_often() -> None:
    rewards = np.repeat([0.0, 1.0], 8)
    sides = [int(rewards[choose("max_variance", rewards, 5, 0, GroupId(0, row))].sum()) for row in range(2000)]
    assert set(sides) == {2, 3}
    assert 860 < sides.count(3) < 1140  # 6 standard deviations


def test_a_side_that_many_splits_reach_is_not_drawn_more_often() -> None:
    rewards = np.concatenate((np.zeros(13), np.ones(3)))  # k = 3, 4, 5 are all the same three positives
    sides = [int(rewards[choose("max_variance", rewards, 5, 0, GroupId(0, row))].sum()) for row in range(2000)]
    assert set(sides) == {2, 3}
    assert 860 < sides.count(3) < 1140


@pytest.mark.parametrize("name", BUILT_IN)
def test_tied_rollouts_are_kept_equally_often(name: str) -> None:
    n, m, groups = 16, 4, 4000
    counts = np.zeros(n)
    for row in range(groups):
        counts[choose(name, np.ones(n), m, 7, GroupId(0, row))] += 1
    expected = groups * m / n
    # 15 degrees of freedom; sampling without replacement only narrows it. 60 has a probability of 2e-7.
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_ties_inside_a_class_are_broken_evenly_and_not_by_index() -> None:
    rewards = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])  # 2 zeros, 6 ones: both zeros, 2 of the ones
    counts = np.zeros(8)
    for row in range(3000):
        counts[choose("max_variance", rewards, 4, 1, GroupId(2, row, 1))] += 1
    assert counts[1] == counts[3] == 3000
    ones = counts[rewards == 1.0]
    assert ((ones - 1000) ** 2 / 1000).sum() < 45  # 5 degrees of freedom: 1e-8


@law(60)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.1]), min_size=3, max_size=24), st.randoms(), st.data())
def test_permuting_the_rollouts_permutes_the_kept_rewards(rewards: list[float], random, data: st.DataObject) -> None:
    values = np.array(rewards)
    m = data.draw(st.integers(2, len(values)))
    shuffled = values.copy()
    random.shuffle(shuffled)
    for name in ("max_reward", "min_reward", "percentile"):
        kept, other = (np.sort(v[choose(name, v, m)]) for v in (values, shuffled))
        np.testing.assert_array_equal(kept, other)
    kept, other = (v[choose("max_variance", v, m)] for v in (values, shuffled))
    assert variance(kept) == pytest.approx(variance(other), rel=1e-10, abs=1e-30)


@law(40)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=70), st.sampled_from(BUILT_IN), st.data())
def test_every_rule_returns_m_distinct_rising_indices_again_and_again(rewards, name, data) -> None:
    m = data.draw(st.integers(1, len(rewards)))
    kept = choose(name, rewards, m)
    assert len(kept) == m
    assert np.all(np.diff(kept) > 0)
    assert kept[0] >= 0
    assert kept[-1] < len(rewards)
    np.testing.assert_array_equal(kept, choose(name, rewards, m))


def test_max_and_min_reward_take_the_ends() -> None:
    rewards = np.array([0.3, 0.9, -1.0, 0.5, 2.0])
    assert choose("max_reward", rewards, 2).tolist() == [1, 4]
    assert choose("min_reward", rewards, 2).tolist() == [0, 2]


def test_percentile_takes_evenly_spread_ranks() -> None:
    rewards = np.arange(64.0)[::-1]
    ranks = np.sort(rewards[choose("percentile", rewards, 16)])
    at = (np.arange(16) + 0.5) / 16
    np.testing.assert_allclose(ranks, np.quantile(rewards, at), atol=0.5)


def test_streams_differ_by_seed_epoch_row_and_attempt() -> None:
    draws = {
        tuple(group_rng(seed, GroupId(*group)).integers(0, 2**63, 4).tolist())
        for seed in (0, 1, -1, 2**63)
        for group in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (2**40, 3, 0))
    }
    assert len(draws) == 24


def test_neighbouring_streams_are_uncorrelated() -> None:
    first = np.array([group_rng(0, GroupId(0, row)).random(8) for row in range(4000)])
    assert abs(first.mean() - 0.5) < 0.01
    correlation = np.corrcoef(first.ravel()[:-8], first.ravel()[8:])[0, 1]
    assert abs(correlation) < 6 / np.sqrt(first.size)


def test_a_rule_leaves_the_rewards_alone() -> None:
    rewards = np.random.default_rng(0).random(32)
    before = rewards.copy()
    for name in BUILT_IN:
        choose(name, rewards, 8)
    np.testing.assert_array_equal(rewards, before)


def test_the_rules_are_known_and_callable_as_they_are() -> None:
    assert set(BUILT_IN) <= set(known_rules())
    assert rules.max_variance(np.array([0.0, 1.0, 0.5]), 2, group_rng(0, GROUP), CONTEXT).tolist() == [0, 1]
