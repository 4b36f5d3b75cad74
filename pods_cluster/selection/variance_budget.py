"""The kept rollouts of a step spread over its groups by their spread of rewards, in place of a fixed m each (pure).

Neyman's allocation (1934): for a fixed number of samples the variance of a mean over strata is least when each stratum gets as
many as its standard deviation asks for. Here the strata are the groups of a step. D3S (arXiv 2509.22115) selects across
groups for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

LEAST = 2
"""Fewest rollouts of a group: one alone has no contrast."""
_ROUNDS = 100


def allocate(spreads: Sequence[float], sizes: Sequence[int], budget: int) -> Int64[np.ndarray, " groups"]:
    """Number of rollouts that each group keeps, `budget` in all: in proportion to `spreads` (standard deviations, from 0 on),
    within [LEAST, size].

    Where the bounds do not allow the budget the sum is the nearest that they allow. Groups of no spread get LEAST; where none
    has any, all get the same; of no group there is nothing to give. Rounding favours the larger remainder, then the larger
    spread, then the earlier group.
    """
    given, most = np.asarray(spreads, dtype=float), np.asarray(sizes, dtype=np.int64)
    if not len(given):
        return most
    least = np.minimum(LEAST, most)
    budget = int(np.clip(budget, least.sum(), most.sum()))
    largest = float(given.max(initial=0.0))
    # what is a billionth of the largest is nothing, so that the search below ends
    spread = np.where(given > 1e-9 * largest, given / largest, 0.0) if largest > 0 else np.ones(len(given))
    # the sum of the bounded shares rises with their common factor: halve the interval that holds it
    low, high = 0.0, float(most.max()) / float(spread[spread > 0].min())
    for _ in range(_ROUNDS):
        factor = (low + high) / 2
        low, high = (factor, high) if np.clip(factor * spread, least, most).sum() < budget else (low, factor)
    shares = np.clip(high * spread, least, most)
    kept = np.floor(shares + 1e-9).astype(np.int64)
    # Left over: one each by remainder, and of groups without spread only where no other has room.
    while (left := budget - int(kept.sum())) > 0:
        room = kept < most
        order = sorted(np.flatnonzero(room), key=lambda at: (-(shares[at] - kept[at]), -given[at], at))
        kept[order[:left]] += 1
    return kept
