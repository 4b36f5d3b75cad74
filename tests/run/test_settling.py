"""Which configurations may stop groups early."""

from __future__ import annotations

import pytest

from pods_cluster.config import ConfigError
from pods_cluster.selection.policy import selection_policy
from tests.run.parts import loop_config


def always(rewards, m, rng, context):
    return range(m)


def pairs(rewards, m, rng, context):
    return range(m)


pairs.settled = lambda rewards, m, low, high, tolerance: len(rewards) >= m  # type: ignore[attr-defined]


def test_off_means_none() -> None:
    assert selection_policy(loop_config()).settling is None


def test_the_range_is_that_of_the_total_reward() -> None:
    settling = selection_policy(
        loop_config(
            "selector.settle=waves",
            "selector.waves=2",
            "reward=[{name: exact_match, weight: 2}, {name: boxed_format, weight: -0.5}]",
        )
    ).settling
    assert settling is not None
    assert (settling.low, settling.high) == (-0.5, 2.0)
    assert settling.first_wave(8) == 4


def test_a_rule_of_the_users_own_states_its_condition_or_is_refused() -> None:
    here = __name__
    settling = selection_policy(loop_config("selector.settle=abort", f"selector.rule={here}:pairs")).settling
    assert settling is not None
    assert settling.condition is pairs.settled  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"selector\.settle: abort needs a rule with a settled condition.*settle: off"
    ):
        selection_policy(loop_config("selector.settle=abort", f"selector.rule={here}:always"))


def test_rewards_without_a_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.1\.name: '.*' declares no range; add reward\.1\.range"):
        selection_policy(
            loop_config(
                "selector.settle=abort",
                "reward=[{name: exact_match}, {name: 'tests.run.rewards:even_digits'}]",
            )
        )


def test_a_tolerance_of_half_the_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"selector\.tolerance: 0\.5 must be"):
        selection_policy(loop_config("selector.settle=abort", "selector.tolerance=0.5"))
