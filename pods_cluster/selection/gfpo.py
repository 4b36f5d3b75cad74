"""GFPO's rules (arXiv 2508.09726): learn from short answers, or from those of the most reward a token."""

from __future__ import annotations

import numpy as np

from pods_cluster.selection.rules import Indices, Rewards, RuleContext, highest


def shortest(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m rollouts of fewest completion tokens, whatever their rewards."""
    return highest(-_lengths(context, len(rewards)), m, rng)


def reward_per_token(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m rollouts of most reward a completion token. Meant for rewards from 0 on: a negative one counts the less
    the longer its rollout is.
    """
    return highest(rewards / np.maximum(_lengths(context, len(rewards)), 1.0), m, rng)


def _lengths(context: RuleContext, n: int) -> np.ndarray:
    if context.lengths is None or len(context.lengths) != n:
        raise ValueError("the rule needs the lengths of the rollouts, which its caller did not give")
    return context.lengths.astype(np.float64)
