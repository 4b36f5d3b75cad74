"""A choice with a floor of each sign, as the balanced groups of Reinforce-Ada (arXiv 2510.04996) have it."""

# ruff: noqa: ARG001 (every rule has the same four arguments)
from __future__ import annotations

import math

import numpy as np

from pods_cluster.selection.rules import Indices, Rewards, RuleContext, spread_from_mean


def balanced(
    rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext, *, floor: float = 0.25
) -> Indices:
    """Keep floor x m rollouts (rounded down) above the group's mean and as many below it, as far as there are such; the rest
    of the m is drawn from all others alike.

    Which of a sign are kept is chance: unlike `max_variance` it does not prefer extremes, so that the kept rewards of a sign
    are a fair sample of it. `floor` 0.5 is half and half; 0 is `random`. Raises ValueError for a floor outside [0, 0.5].
    """
    if not 0.0 <= floor <= 0.5:
        raise ValueError(f"floor: {floor} is no share of each sign; give a number from 0 to 0.5")
    least = math.floor(floor * m + 1e-9)
    order = rng.permutation(len(rewards))
    sign = np.sign(spread_from_mean(rewards))[order]
    first = np.concatenate((order[sign > 0][:least], order[sign < 0][:least]))
    rest = order[~np.isin(order, first)]
    return np.sort(np.concatenate((first, rest[: m - len(first)])))
