"""The settled condition: a group's selection can gain nothing more, although some of its rollouts are unfinished.

For `max_variance` with rewards in a known range [low, high]: the variance of m values in that range is greatest with
floor(m/2) of them at one end and ceil(m/2) at the other (Popoviciu's bound for m points). Once a group holds that
many, no further rollout can help. Until then one more reward at an end always raises the variance, since variance is
strictly convex in each value: the condition is exact.

There are two ways to use it. Aborting the unfinished rollouts favours short ones, which finish first. Waves issue the
n rollouts in portions, wait for each whole portion, and stop between portions: what is trained on does not depend on
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from pods_cluster.scoring.reward_range import range_slack

SettledCondition = Callable[..., bool]
"""A function `(finished rewards, m, low, high, tolerance) -> bool`."""


def check_range(low: float, high: float, tolerance: float = 0.0) -> None:
    """Raise ValueError unless low < high are finite and 0 <= tolerance < (high - low) / 2."""
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"reward range: [{low}, {high}] must be two finite numbers, the lower one first")
    if not 0 <= tolerance < (high - low) / 2:
        raise ValueError(
            f"selector.tolerance: {tolerance} must be at least 0 and less than half the reward range [{low}, {high}]"
        )


def is_settled(
    rewards: Float64[np.ndarray, " finished"] | Sequence[float],
    m: int,
    low: float,
    high: float,
    tolerance: float = 0.0,
) -> bool:
    """Whether `max_variance` over the finished `rewards` can gain nothing from any further reward in [low, high].

    NaN and infinite rewards do not count. A reward within `tolerance` of an end counts as at that end; the kept
    variance is then at least (1 - 2 tolerance / (high - low))^2 of the greatest possible. Raises ValueError for a bad
    range, or for a reward outside it: a wrong range would stop groups that could still gain.
    """
    check_range(low, high, tolerance)
    values = np.asarray(rewards, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return False
    slack = range_slack(low, high)
    if values.min() < low - slack or values.max() > high + slack:
        outside = values[(values < low - slack) | (values > high + slack)][0]
        raise ValueError(
            f"reward: {outside} lies outside its declared range [{low}, {high}]; correct the range of the reward"
        )
    at_low = int(np.count_nonzero(values <= low + tolerance + slack))
    at_high = int(np.count_nonzero(values >= high - tolerance - slack))
    return min(at_low, at_high) >= m // 2 and max(at_low, at_high) >= (m + 1) // 2


@dataclass(frozen=True, slots=True)
class WaveDecision:
    """The decision after a portion: `issue` is the size of the next one (0: none); `settled`: the group stopped early."""

    issue: int
    settled: bool


def plan_waves(n: int, m: int, waves: int) -> tuple[int, ...]:
    """Return the portions in which n rollouts are issued: near-equal, the first at least m (fewer cannot settle).

    Raises ValueError unless 2 <= m <= n and waves >= 1.
    """
    if not 2 <= m <= n:
        raise ValueError(f"selector.keep: {m} must be at least 2 and at most n = {n}")
    if waves < 1:
        raise ValueError(f"selector.waves: {waves} must be at least 1")
    first = min(n, max(m, -(-n // waves)))
    rest = n - first
    portions = min(waves - 1, rest)
    if waves == 1 or rest == 0:
        return (n,)
    base, extra = divmod(rest, portions)
    return (first, *(base + (i < extra) for i in range(portions)))


def after_wave(
    portions: Sequence[int],
    issued: int,
    rewards: Float64[np.ndarray, " issued"] | Sequence[float],
    m: int,
    low: float,
    high: float,
    *,
    tolerance: float = 0.0,
    condition: SettledCondition = is_settled,
) -> WaveDecision:
    """Decide how a group goes on once all rollouts of its first portions, `issued` in all, have come back or failed.

    `rewards` are those of every one of them, NaN where there is no valid reward: deciding on a part would favour short
    rollouts. Raises ValueError when `issued` is not the end of a portion, or `rewards` are fewer or more.
    """
    ends = np.cumsum(portions)
    (at,) = np.nonzero(ends == issued)
    if len(at) == 0:
        raise ValueError(f"issued: {issued} is not the end of a portion of {tuple(portions)}")
    if len(rewards) != issued:
        raise ValueError(
            f"rewards: {len(rewards)} of the {issued} rollouts issued are given; wait for the portion to end"
        )
    if condition(rewards, m, low, high, tolerance):
        return WaveDecision(0, settled=issued < int(ends[-1]))
    following = int(at[0]) + 1
    return WaveDecision(int(portions[following]) if following < len(portions) else 0, settled=False)
