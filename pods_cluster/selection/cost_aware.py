"""Cost-Aware GRPO's rule (arXiv 2604.28020): draw by advantage against cost, weight by the inverse of the chance."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from pods_cluster.selection.rules import Rewards, RuleContext, Weighted, spread_from_mean


def cost_aware(
    rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext, *, explore: float = 0.1
) -> Weighted:
    """Draw m rollouts with chances that grow with |advantage| / sqrt(tokens), and weight each by m / (n x its chance).

    This is the paper's distribution for the least cost of a gradient, with the advantage in place of the gradient's norm
    and the tokens of prompt and completion as cost. The paper draws with replacement; here all m differ, each has its chance
    pi_i exactly (systematic sampling, Madow 1949), and the weighted mean over the kept is an unbiased estimate of the mean
    over all n (Horvitz and Thompson 1952) where advantages are those of the group (`learner.advantage.scope: group`). A share
    `explore` of the chances is uniform, which bounds the weights by 1 / explore. Raises ValueError for an `explore` outside
    (0, 1].
    """
    if not 0.0 < explore <= 1.0:
        raise ValueError(f"explore: {explore} is no share of the chances; give a number above 0, up to 1")
    n = len(rewards)
    if context.lengths is None:
        raise ValueError("the rule needs the lengths of the rollouts, which its caller did not give")
    cost = context.lengths + max(context.prompt_tokens, 0)
    chances = inclusion_chances(np.abs(spread_from_mean(rewards)) / np.sqrt(np.maximum(cost, 1)), m, explore)
    kept = _systematic(chances, rng)
    return Weighted(kept, m / (n * chances[kept]))


def inclusion_chances(size: Float64[np.ndarray, " n"], m: int, explore: float) -> Float64[np.ndarray, " n"]:
    """Chances [n] that sum to m, proportional to `size` but for a uniform share `explore`, and at most 1."""
    n = len(size)
    total = float(size.sum())
    share = (1 - explore) * size / total + explore / n if total > 0 else np.full(n, 1.0 / n)
    chances = np.zeros(n)
    certain = np.zeros(n, dtype=bool)
    while True:  # what would be above 1 is certain, and the others share the rest; each round makes one certain or ends
        left = m - int(certain.sum())
        chances[certain] = 1.0
        if left > 0:
            chances[~certain] = left * share[~certain] / share[~certain].sum()
        above = (chances > 1.0) & ~certain
        if not above.any():
            return chances
        certain |= above


def _systematic(chances: Float64[np.ndarray, " n"], rng: np.random.Generator) -> np.ndarray:
    """m different indices, each with its chance: points at distance 1 on the chances laid end to end in random order."""
    order = rng.permutation(len(chances))
    m = round(float(chances.sum()))
    ends = np.cumsum(chances[order])
    ends *= m / ends[-1]
    places = np.searchsorted(ends, rng.random() + np.arange(m), side="right")
    # rounding may put two points into one that is all but certain, or the last beyond the end
    places = np.minimum(places, len(order) - 1)
    for at in range(1, m):
        places[at] = max(places[at], places[at - 1] + 1)
    for at in range(m - 1, -1, -1):
        places[at] = min(places[at], len(order) - (m - at))
    return np.sort(order[places])
