"""CPPO's rule (arXiv 2503.22342): keep the rollouts of largest absolute advantage."""

# ruff: noqa: ARG001 (every rule has the same four arguments)
from __future__ import annotations

import numpy as np

from pods_cluster.selection.rules import Indices, Rewards, RuleContext, highest, spread_from_mean


def abs_advantage(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m rollouts whose rewards are farthest from the group's mean, on either side.

    The advantage (r - mean) / std of a group has the order of r - mean. With binary rewards the rarer of right and wrong
    comes first, however many of it there are.
    """
    return highest(np.abs(spread_from_mean(rewards)), m, rng)
