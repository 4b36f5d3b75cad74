"""The total reward: a weighted sum that is missing when a part that counts is missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pods_cluster.config import RewardConfig
from pods_cluster.scoring.reward_registry import declared_range


def combine(
    rewards: Sequence[RewardConfig], parts: Mapping[str, float | None], failed: Collection[str] = ()
) -> float | None:
    """The sum of weight x part, or None when a reward that counts has no finite part.

    `parts` and `failed` (rewards that failed) are by `RewardConfig.key`. A part may be missing only where its reward
    says `none: skip` and did not fail; if nothing is left to sum, the total is None. Rewards of weight 0 do not count.
    """
    terms: list[float] = []
    for reward in rewards:
        if reward.weight == 0:
            continue
        part = parts.get(reward.key)
        if part is None and reward.none == "skip" and reward.key not in failed:
            continue
        if part is None or not math.isfinite(part):
            return None
        terms.append(reward.weight * part)
    total = math.fsum(terms)
    return total if terms and math.isfinite(total) else None


def total_range(rewards: Sequence[RewardConfig]) -> tuple[float, float] | None:
    """The (lowest, highest) total, or None when a reward that counts declares no range.

    A reward that may be skipped can also add 0.
    """
    lowest, highest = [], []
    for reward in rewards:
        if reward.weight == 0:
            continue
        bounds = declared_range(reward)
        if bounds is None:
            return None
        terms = [reward.weight * bound for bound in bounds] + ([0.0] if reward.none == "skip" else [])
        lowest.append(min(terms))
        highest.append(max(terms))
    return math.fsum(lowest), math.fsum(highest)
