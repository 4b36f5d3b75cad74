"""Whether a configuration's groups may be stopped early, and within which range of rewards."""

from __future__ import annotations

from pods_cluster.config import Config, ConfigError
from pods_cluster.scoring.reward_registry import declared_range
from pods_cluster.scoring.total_reward import total_range
from pods_cluster.selection.rule_registry import resolve
from pods_cluster.selection.stopping import Settling


def settling_of(config: Config) -> Settling | None:
    """What `selector.settle` comes to; None when it is off.

    Imports the rule. Raises ConfigError for a rule without a settled condition, and for rewards without a range.
    """
    selector = config.selector
    if selector.settle == "off":
        return None
    rule = resolve(selector.rule, selector.options)
    if rule.settled is None:
        raise ConfigError(
            f"selector.settle: {selector.settle} needs a rule with a settled condition, which {selector.rule!r} does not "
            f"state; give the function an attribute `settled` (rewards, m, low, high, tolerance) -> bool, "
            f"or set selector.settle: off"
        )
    ends = total_range(config.reward)
    if ends is None:
        at = next(i for i, reward in enumerate(config.reward) if reward.weight and declared_range(reward) is None)
        raise ConfigError(
            f"selector.settle: {selector.settle} needs to know how high and low rewards can get, but "
            f"reward.{at}.name: {config.reward[at].name!r} declares no range; add reward.{at}.range: [lowest, highest], "
            f"or set selector.settle: off"
        )
    try:
        return Settling(selector.settle, *ends, selector.waves, selector.tolerance, rule.settled)
    except ValueError as error:
        raise ConfigError(f"{error}, or set selector.settle: off") from None
