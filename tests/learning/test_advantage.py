import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.learning.advantage import advantages


def test_formula_of_the_paper_code():
    rewards = np.array([1.0, 0.0, 0.0, 1.2])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages(rewards), expected, rtol=1e-12)


def test_group_scope_and_mean_only():
    rewards = np.array([1.0, 0.0])
    np.testing.assert_allclose(
        advantages(rewards, scope="group", group_mean=0.25, group_std=0.5), (rewards - 0.25) / 0.5001
    )
    np.testing.assert_allclose(advantages(rewards, normalize=False), [0.5, -0.5])
    np.testing.assert_allclose(advantages(rewards, scope="group", normalize=False, group_mean=0.25), [0.75, -0.25])


@given(st.floats(-1e6, 1e6), st.integers(1, 40), st.booleans())
def test_equal_rewards_give_exact_zeros(value, count, normalize):
    assert not advantages(np.full(count, value), normalize=normalize).any()


def test_large_offset_keeps_the_differences():
    small = np.array([0.0, 0.001, 0.002, 0.001])
    np.testing.assert_allclose(advantages(small + 1e4), advantages(small), rtol=1e-6)


def test_group_scope_without_statistics_is_refused():
    with pytest.raises(ValueError, match="group_mean"):
        advantages(np.array([0.0, 1.0]), scope="group")
    with pytest.raises(ValueError, match="not finite"):
        advantages(np.array([0.0, np.nan]))
