"""The total reward: a weighted sum that is missing when a part that counts is missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pods_cluster.scoring.reward_registry import declared_range
from pods_cluster.scoring.spec import RewardSpec


def combine(
    specs: Sequence[RewardSpec], parts: Mapping[str, float | None], failed: Collection[str] = ()
) -> float | None:
    """Sum of weight x part over the rewards, or None when one that counts has no finite value.

    A part may be left out only where its spec says `none: skip` and it did not fail (`failed`: keys of those that
    did); if nothing is left to sum, the total is None. Rewards of weight 0 never matter.
    """
    terms: list[float] = []
    for spec in specs:
        if spec.weight == 0:
            continue
        part = parts.get(spec.key)
        if part is None and spec.none == "skip" and spec.key not in failed:
            continue
        if part is None or not math.isfinite(part):
            return None
        terms.append(spec.weight * part)
    total = math.fsum(terms)
    return total if terms and math.isfinite(total) else None


def total_range(specs: Sequence[RewardSpec]) -> tuple[float, float] | None:
    """(lowest, highest) total, or None when a reward that counts declares no range.

    A reward that may be skipped can also add 0.
    """
    lowest, highest = [], []
    for spec in specs:
        if spec.weight == 0:
            continue
        ends = declared_range(spec)
        if ends is None:
            return None
        terms = [spec.weight * end for end in ends] + ([0.0] if spec.none == "skip" else [])
        lowest.append(min(terms))
        highest.append(max(terms))
    return math.fsum(lowest), math.fsum(highest)
