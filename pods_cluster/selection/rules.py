"""Down-sampling rules: each chooses the m of a group's n rollouts that are trained on.

A rule is a pure function `(rewards, m, rng, context, **options) -> m indices`. `rewards` (float64 [n], by rollout
index) are all finite, and m <= n. All randomness comes from `rng`, which is seeded by (run seed, group). So a
selection is a function of (run seed, group, rewards by index), never of the order in which rollouts arrived: short
rollouts arrive first, and a tie broken by arrival would favour them.
"""

# ruff: noqa: ARG001, ARG002 (every rule has the same four arguments)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, UInt64
from numpy.random.bit_generator import ISeedSequence

from pods_cluster.types import GroupId

Rewards = Float64[np.ndarray, " n"]
Indices = Int64[np.ndarray, " m"]
Weights = Float64[np.ndarray, " m"]

RuleFunction = Callable[..., Any]
"""`(rewards: float64 [n], m: int, rng: Generator, context: RuleContext, **selector.options) -> m distinct indices`, or
`Weighted`."""


class Weighted(NamedTuple):
    """Result of a rule that weights what it keeps: m distinct indices, and what the loss of each counts (1: as without
    weights), finite and not negative.
    """

    indices: Indices
    weights: Weights


EQUAL_VARIANCE = 1e-12
"""Relative difference of variance below which two sets count as equally good."""

_STREAM = 0x706F64732D73656C  # "pods-sel": keeps this use of the run's seed apart from any other
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class RuleContext:
    """Inputs of a rule besides the rewards. Arrays are parallel to the rewards ([n], valid rollouts only).

    `indices` are the rollouts' indices in the group, `lengths` their completion tokens, `truncated` whether the token
    limit ended them, `parts` the reward components by name (NaN: missing). An array is None where the caller has none.
    """

    group: GroupId
    seed: int
    indices: Int64[np.ndarray, " n"] | None = None
    lengths: Int32[np.ndarray, " n"] | None = None
    truncated: Bool[np.ndarray, " n"] | None = None
    parts: dict[str, Float64[np.ndarray, " n"]] | None = None
    prompt_tokens: int = 0


class _Key(ISeedSequence):
    """Hands Philox its key as it is: numpy's SeedSequence would cost more than a whole selection of 64."""

    __slots__ = ("words",)

    def __init__(self, *words: int) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> UInt64[np.ndarray, " words"]:
        return np.array(self.words, dtype=np.uint64)


def group_rng(seed: int, group: GroupId) -> np.random.Generator:
    """Return the random stream of one group: Philox 4x64 keyed by the run's seed, from (0, epoch, row, attempt) on.

    Philox is a bijection of its 256-bit counter under each key (Salmon et al., SC 2011), so different groups of a run
    read disjoint stretches of 2^64 blocks: no hash, no collisions.
    """
    key: Any = _Key(seed & _WORD, _STREAM)  # any ISeedSequence will do, which numpy's stubs do not say
    start = np.array((0, group[0] & _WORD, group[1] & _WORD, group[2] & _WORD), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter=start))


def _rising(rewards: Rewards, rng: np.random.Generator) -> Int64[np.ndarray, " n"]:
    """Sort the indices from the lowest to the highest reward, equal rewards in random order."""
    shuffled = rng.permutation(len(rewards))
    return shuffled[rewards[shuffled].argsort(kind="stable")]


def highest(values: Float64[np.ndarray, " n"], m: int, rng: np.random.Generator) -> Indices:
    """Indices of the m highest values in rising order, equal ones chosen at random."""
    return np.sort(_rising(values, rng)[len(values) - m :])


def spread_from_mean(rewards: Rewards) -> Float64[np.ndarray, " n"]:
    """Rewards less their mean, in parts of the largest such difference: in [-1, 1], zeros where all are equal.

    Rounded to twelve digits, so that rewards at equal distance are equal whatever the rounding of the mean.
    """
    low, high = float(rewards.min()), float(rewards.max())
    if low == high:
        return np.zeros(len(rewards))
    # halves first: the range of two doubles need not fit a double
    shifted = rewards * 0.5 - low * 0.5
    shifted = shifted / float(shifted.max())
    centred = shifted - shifted.mean()
    return np.round(centred / float(np.abs(centred).max()), 12)


def _to_unit_range(ends: Float64[np.ndarray, "2 m"]) -> None:
    """Map rewards (the m lowest rising, the m highest falling) onto [-1, 1] in place; zeros when all are equal.

    The middle of the range goes to 0. Variance is compared after this map: E[x^2] - E[x]^2 on raw values is wrong at
    offset 1e4 and spread 1e-3. Two-valued rewards become exactly -1 and 1, so their sums are exact.
    """
    low, high = float(ends[0, 0]), float(ends[1, 0])
    if low == high:
        ends.fill(0.0)
        return
    if high - low == math.inf:  # the range does not fit a double; its quarter does
        ends *= 0.25
    elif high - low < 1e-290:  # subnormal numbers have few digits; the product is exact
        ends *= 2.0**500
    low, high = float(ends[0, 0]), float(ends[1, 0])
    half = (high - low) * 0.5
    ends -= low + half
    ends /= half


def max_variance(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m rollouts of greatest reward variance, in O(n log n) (PODS, arXiv 2504.13818, Lemma 3.1).

    Such a set is always the k highest and the m - k lowest for some k: after one sort, the sums for all k = 0..m come
    from two prefix sums. Among different sets of equal variance (odd m with binary rewards) one is drawn at random.
    """
    order = _rising(rewards, rng)
    n = len(order)
    # [value, square] x [the m lowest rising, the m highest falling] x [a leading 0, then the m]
    ends = np.zeros((2, 2, m + 1))
    ends[0, 0, 1:] = rewards[order[:m]]
    ends[0, 1, 1:] = rewards[order[: n - m - 1 : -1] if m < n else order[::-1]]
    x = ends[0, :, 1:]
    _to_unit_range(x)
    np.multiply(x, x, out=ends[1, :, 1:])
    sums = np.add.accumulate(ends, axis=2)  # over the first 0..m of each end
    total = sums[0, 0, ::-1] + sums[0, 1]  # over the set of each k = 0..m
    total *= total
    total /= m
    variance = sums[1, 0, ::-1] + sums[1, 1]
    variance -= total  # times m
    best = variance[variance.argmax()]
    candidates = (variance >= best * (1 - EQUAL_VARIANCE)).nonzero()[0]
    k = int(candidates[0])
    if len(candidates) > 1:
        # From k-1 to k the value at m-k is traded for the one at n-k. Where these are equal the set of values stays the
        # same, and it must not be drawn more often for that.
        low, high = rewards[order[m - candidates[1:]]], rewards[order[n - candidates[1:]]]
        distinct = candidates[np.concatenate(((True,), low != high))]
        k = int(distinct[rng.integers(len(distinct))]) if len(distinct) > 1 else k
    kept = np.concatenate((order[: m - k], order[n - k :]))
    kept.sort()
    return kept


def max_reward(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m highest rewards (an ablation of the paper: it loses the negative examples)."""
    return np.sort(_rising(rewards, rng)[len(rewards) - m :])


def min_reward(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the m lowest rewards."""
    return np.sort(_rising(rewards, rng)[:m])


def random(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep m rollouts drawn uniformly, whatever their rewards."""
    return np.sort(rng.permutation(len(rewards))[:m])


def percentile(rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """Keep the rollouts at the percentiles 0.5/m, 1.5/m, ..., (m - 0.5)/m of the reward.

    Percentile p is at position p (n - 1) of the sorted rewards (numpy's `linear`), and the nearest rollout is taken;
    the m positions are distinct for every m <= n.
    """
    n = len(rewards)
    places = ((2 * np.arange(m) + 1) * (n - 1) + m) // (2 * m)
    return np.sort(_rising(rewards, rng)[places])
