"""Down-sampling rules: which m of a group's n rollouts teach most.

A rule is a pure function `(rewards, m, rng, context, **options) -> m indices`. `rewards` is float64 [n] by rollout
index, all finite, with m <= n. Everything random in a rule comes from `rng`, a stream of its own for each (run seed,
group), so a selection is a function of (run seed, group, rewards by index) and never of the order in which rollouts
arrived: short rollouts arrive first, and a tie broken by arrival would favour them.
"""

# ruff: noqa: ARG001, ARG002 (every rule has the same four arguments)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from pods_cluster.types import GroupId

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

RuleFunction = Callable[..., Any]
"""`(rewards: float64 [n], m: int, rng: Generator, context: RuleContext, **selector.options) -> m distinct indices`."""

EQUAL_VARIANCE = 1e-12
"""Two splits whose variances differ by less than this share are equally good."""

_STREAM = 0x706F64732D73656C  # "pods-sel": keeps this use of the run's seed apart from any other
_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class RuleContext:
    """What a rule may know beside the rewards; arrays are parallel to `rewards` ([n], valid rollouts only).

    `indices` are the rollouts' indices in the group, `lengths` completion tokens, `truncated` whether the token limit
    ended them, `parts` the reward components by name (NaN = missing). An array is None where the caller has no such
    numbers.
    """

    group: GroupId
    seed: int
    indices: Indices | None = None
    lengths: NDArray[np.int32] | None = None
    truncated: NDArray[np.bool_] | None = None
    parts: dict[str, Floats] | None = None
    prompt_tokens: int = 0


class _Key(ISeedSequence):
    """Hands Philox its key as it is: numpy's SeedSequence would cost more than a whole selection of 64."""

    __slots__ = ("words",)

    def __init__(self, *words: int) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.array(self.words, dtype=np.uint64)


def group_rng(seed: int, group: GroupId) -> np.random.Generator:
    """The random stream of one group: Philox 4x64 keyed by the run's seed, counting from (0, epoch, row, attempt).

    Philox is a bijection of its 256-bit counter under each key (Salmon et al., SC 2011), so different groups of a run
    read disjoint stretches of 2^64 blocks: no hash, no collisions.
    """
    key: Any = _Key(seed & _WORD, _STREAM)  # any ISeedSequence will do, which numpy's stubs do not say
    start = np.array((0, group[0] & _WORD, group[1] & _WORD, group[2] & _WORD), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter=start))


def _rising(rewards: Floats, rng: np.random.Generator) -> Indices:
    """Indices from the lowest to the highest reward, equal rewards in a random order."""
    shuffled = rng.permutation(len(rewards))
    return shuffled[rewards[shuffled].argsort(kind="stable")]


def _to_unit_range(ends: Floats) -> None:
    """Map rewards ([2, m]: the lowest rising, the highest falling) onto [-1, 1] in place; zeros when all are equal.

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


def max_variance(rewards: Floats, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """The m rollouts of greatest reward variance, in O(n log n) (PODS, arXiv 2504.13818, Lemma 3.1).

    Such a set always is the k highest and m - k lowest for some k: sort once, then the sums over all k = 0..m come
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
        # Step k-1 -> k trades the value at m-k for the one at n-k. Where they are equal the set stays the same, and it
        # shall not be drawn more often for that.
        low, high = rewards[order[m - candidates[1:]]], rewards[order[n - candidates[1:]]]
        distinct = candidates[np.concatenate(((True,), low != high))]
        k = int(distinct[rng.integers(len(distinct))]) if len(distinct) > 1 else k
    kept = np.concatenate((order[: m - k], order[n - k :]))
    kept.sort()
    return kept


def max_reward(rewards: Floats, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """The m highest rewards (the paper's ablation: it loses the negative examples)."""
    return np.sort(_rising(rewards, rng)[len(rewards) - m :])


def min_reward(rewards: Floats, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """The m lowest rewards."""
    return np.sort(_rising(rewards, rng)[:m])


def random(rewards: Floats, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """m rollouts drawn uniformly, whatever their rewards."""
    return np.sort(rng.permutation(len(rewards))[:m])


def percentile(rewards: Floats, m: int, rng: np.random.Generator, context: RuleContext) -> Indices:
    """The rollouts at the percentiles 0.5/m, 1.5/m, ..., (m - 0.5)/m of the reward.

    A percentile p stands at p (n - 1) in the sorted rewards (numpy's `linear`), and the nearest rollout is taken; the m
    places are distinct for every m <= n.
    """
    n = len(rewards)
    places = ((2 * np.arange(m) + 1) * (n - 1) + m) // (2 * m)
    return np.sort(_rising(rewards, rng)[places])
