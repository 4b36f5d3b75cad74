"""Rules beyond the paper: each by its law, on rewards and lengths of any kind; weights by what they estimate."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import ConfigError, build_config
from pods_cluster.selection.cost_aware import inclusion_chances
from pods_cluster.selection.decision_packing import pack_selections, unpack_selections
from pods_cluster.selection.policy import selection_policy
from pods_cluster.selection.rule_registry import RuleError, RuleOptionsError, register_rule, resolve
from pods_cluster.selection.rules import RuleContext, Weighted, group_rng, spread_from_mean
from pods_cluster.selection.select import select
from pods_cluster.types import GroupId, Locator, Selection
from tests.law import law
from tests.selection.policies import run_config

RULES = ("abs_advantage", "balanced", "shortest", "reward_per_token", "cost_aware")


def choose(name: str, rewards: np.ndarray, lengths: np.ndarray, m: int, row: int = 0, **options: float):
    context = RuleContext(GroupId(0, row), 0, lengths=lengths.astype(np.int32), prompt_tokens=5)
    return resolve(name, options).choose(rewards, m, group_rng(0, GroupId(0, row)), context)


@st.composite
def groups(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Rewards [n], lengths [n] and an m below n."""
    reward = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, 0.1])
    rewards = draw(st.lists(reward, min_size=2, max_size=24))
    lengths = draw(st.lists(st.integers(1, 2000), min_size=len(rewards), max_size=len(rewards)))
    return np.array(rewards), np.array(lengths), draw(st.integers(1, len(rewards) - 1))


@pytest.mark.parametrize("name", RULES)
@law(25)
@given(groups())
def test_m_different_rollouts_are_kept(name: str, group: tuple[np.ndarray, np.ndarray, int]) -> None:
    rewards, lengths, m = group
    kept, weights = choose(name, rewards, lengths, m)
    assert len(kept) == m
    assert (np.diff(kept) > 0).all()
    assert 0 <= kept[0] <= kept[-1] < len(rewards)
    assert (weights is not None) == (name == "cost_aware")
    again, _ = choose(name, rewards, lengths, m)
    assert again.tolist() == kept.tolist()


def left_out(kept: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.delete(values, kept)


@law(40)
@given(groups())
def test_none_left_out_has_a_larger_advantage(group: tuple[np.ndarray, np.ndarray, int]) -> None:
    rewards, lengths, m = group
    kept, _ = choose("abs_advantage", rewards, lengths, m)
    size = np.abs(spread_from_mean(rewards))
    assert size[kept].min() >= left_out(kept, size).max()


def test_the_rarer_of_right_and_wrong_comes_first() -> None:
    rewards = np.array([1.0] * 13 + [0.0] * 3)
    kept, _ = choose("abs_advantage", rewards, np.ones(16), 5)
    assert (rewards[kept] == 0).sum() == 3


@law(40)
@given(groups())
def test_none_left_out_is_shorter_or_earns_more_a_token(group: tuple[np.ndarray, np.ndarray, int]) -> None:
    rewards, lengths, m = group
    kept, _ = choose("shortest", rewards, lengths, m)
    assert lengths[kept].max() <= left_out(kept, lengths).min()
    kept, _ = choose("reward_per_token", rewards, lengths, m)
    earned = rewards / lengths
    assert earned[kept].min() >= left_out(kept, earned).max()


@law(40)
@given(groups(), st.floats(0.0, 0.5))
def test_each_sign_has_its_floor_as_far_as_there_is_such(
    group: tuple[np.ndarray, np.ndarray, int], floor: float
) -> None:
    rewards, lengths, m = group
    kept, _ = choose("balanced", rewards, lengths, m, floor=floor)
    sign = np.sign(spread_from_mean(rewards))
    for side in (1, -1):
        assert (sign[kept] == side).sum() >= min(int((sign == side).sum()), int(floor * m))


def test_within_a_sign_all_are_kept_equally_often() -> None:
    rewards, counts = np.concatenate((np.linspace(0.6, 1.0, 8), np.zeros(8))), np.zeros(16)
    for row in range(2000):
        counts[choose("balanced", rewards, np.ones(16), 4, row, floor=0.5)[0]] += 1
    for side in (counts[:8], counts[8:]):
        assert side.sum() == 2000 * 2
        assert ((side - 500) ** 2 / 500).sum() < 40  # 7 degrees of freedom; 40 has a probability of 1e-6


@law(40)
@given(groups(), st.floats(0.01, 1.0))
def test_chances_sum_to_m_and_bound_the_weights(group: tuple[np.ndarray, np.ndarray, int], explore: float) -> None:
    rewards, lengths, m = group
    size = np.abs(spread_from_mean(rewards)) / np.sqrt(lengths)
    chances = inclusion_chances(size, m, explore)
    assert chances.sum() == pytest.approx(m)
    assert chances.max() <= 1 + 1e-12
    assert chances.min() >= m * explore / len(size) - 1e-9
    free = np.flatnonzero(chances < 1 - 1e-9)  # in the order of their sizes
    assert (np.diff(chances[free][np.argsort(size[free])]) >= -1e-9).all()
    _, weights = choose("cost_aware", rewards, lengths, m, explore=explore)
    assert weights is not None
    assert weights.max() <= 1 / explore + 1e-6


def test_the_weighted_mean_of_the_kept_estimates_that_of_the_group() -> None:
    rng = np.random.default_rng(3)
    rewards, lengths = rng.integers(0, 2, 32).astype(float), rng.integers(5, 400, 32)
    gradient = rng.normal(size=32) * spread_from_mean(rewards)  # whatever is to be averaged over the group
    draws, often = 4000, np.zeros(32)
    estimates = np.empty(draws)
    for row in range(draws):
        kept, weights = choose("cost_aware", rewards, lengths, 8, row)
        assert weights is not None
        often[kept] += 1
        estimates[row] = (weights * gradient[kept]).mean()
    size = np.abs(spread_from_mean(rewards)) / np.sqrt(lengths + 5)
    chances = inclusion_chances(size, 8, 0.1)
    assert np.abs(often / draws - chances).max() < 5 * np.sqrt(0.25 / draws)
    assert abs(estimates.mean() - gradient.mean()) < 5 * estimates.std() / np.sqrt(draws)


def test_wrong_options_are_refused_before_a_run() -> None:
    with pytest.raises(RuleOptionsError, match=r"selector\.options: floor: 0\.7 is no share"):
        resolve("balanced", {"floor": 0.7})
    with pytest.raises(RuleOptionsError, match=r"selector\.options: explore: 0 is no share"):
        resolve("cost_aware", {"explore": 0})
    with pytest.raises(RuleOptionsError, match="do not fit the rule 'shortest'"):
        resolve("shortest", {"floor": 0.5})


def test_weights_need_the_advantages_and_the_loss_that_they_are_for() -> None:
    tree = run_config(rule="cost_aware").model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"learner\.advantage\.scope: kept is not possible .* set scope: group"):
        selection_policy(build_config(tree))
    tree["learner"]["advantage"]["scope"] = "group"
    assert selection_policy(build_config(tree)).rule.weighted
    tree["learner"]["loss"] = "token_mean"
    with pytest.raises(ConfigError, match=r"learner\.loss: token_mean divides by the kept tokens"):
        selection_policy(build_config(tree))


def test_a_users_rule_may_weight_and_its_weights_follow_its_indices() -> None:
    @register_rule("weighting", replace=True)
    def weighting(rewards, m, rng, context):
        return Weighted([3, 0], [0.5, 2.0])  # type: ignore[arg-type]

    @register_rule("weighting_wrongly", replace=True)
    def weighting_wrongly(rewards, m, rng, context):
        return Weighted([3, 0], [0.5, -1.0])  # type: ignore[arg-type]

    outcome = select([0.0, 0.5, 1.0, 1.5], 2, "weighting", 0, GroupId(0, 1))
    assert outcome.kept.tolist() == [0, 3]
    assert outcome.weights is not None
    assert outcome.weights.tolist() == [2.0, 0.5]
    with pytest.raises(RuleError, match="2 finite numbers from 0 on"):
        select([0.0, 0.5, 1.0, 1.5], 2, "weighting_wrongly", 0, GroupId(0, 1))


def test_weights_travel_with_a_selection() -> None:
    def selection(row: int, weights: np.ndarray | None) -> Selection:
        group = GroupId(0, row)
        return Selection(
            group=group,
            locators=[Locator("w", group, index) for index in range(2)],
            rewards=np.array([0.0, 1.0]),
            lengths=np.array([3, 4], np.int32),
            prompt_tokens=2,
            first_versions=np.zeros(2, np.int32),
            group_mean=0.5,
            group_std=0.5,
            group_valid=4,
            weights=weights,
        )

    packed = pickle.loads(pickle.dumps(pack_selections([selection(0, None), selection(1, np.array([0.5, 3.0]))])))
    first, second = unpack_selections(packed)
    assert first.weights is None
    assert second.weights is not None
    assert second.weights.tolist() == [0.5, 3.0]
