"""Statistics of one group, kept after the group is gone: the source of a step's metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int32, Shaped

from pods_cluster.selection.select import Outcome, moments
from pods_cluster.types import Fate

Mask = Bool[np.ndarray, " size"] | None
"""Marks some rollouts of a group; None marks all of them."""


@dataclass(slots=True)
class GroupStats:
    """Counts (rollouts), lengths (completion tokens), rewards and tokens of one group.

    Standard deviations are sample deviations; means are NaN where there is nothing to average.

    `size` = `n_finished` + `n_lost` + `n_pending` + `n_unissued`; `n_finished` = `n_valid` + `n_nan` + `n_infinite` +
    `n_aborted` + `n_stale`. `n_valid` could be trained on; `n_stale` finished but too old for the step (their rewards
    are not looked at further); `n_pending` is above 0 only for a cancelled group, `n_unissued` where a group was
    stopped or cancelled between two waves. `reward_*` are over all finite rewards of finished rollouts, stale ones
    included; `length_*` and `truncated_share` over those that were not aborted, `terminated_*` over those of them that
    were not truncated either; `kept_*` over the kept, `stale_*` over the stale, `first_*` over the first wave.
    `tokens` are all that were sampled, `aborted_tokens` among them. `parts_*` are over the finite values of each single
    reward, by name; `parts_squares` are sums of squared distances from `parts_mean`.

    `settled`: the group was stopped early, so that its rewards and lengths are censored. `tokens_saved` is an estimate.
    A rollout that was not issued counts with the mean length. An aborted one counts with what
    `stopping.RemainingLengths` expects and, until that knows any length, with the mean length under a constant chance
    of ending at each token: sampled tokens / whole rollouts, the maximum-likelihood estimate from censored lengths.
    """

    size: int
    n_finished: int = 0
    n_valid: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    n_aborted: int = 0
    n_stale: int = 0
    n_lost: int = 0
    n_pending: int = 0
    n_unissued: int = 0
    n_kept: int = 0
    no_signal: bool = False
    settled: bool = False
    reward_mean: float = math.nan
    reward_std: float = math.nan
    reward_min: float = math.nan
    reward_max: float = math.nan
    kept_mean: float = math.nan
    kept_std: float = math.nan
    first_valid: int = 0
    first_mean: float = math.nan
    tokens: int = 0
    aborted_tokens: int = 0
    tokens_saved: float = 0.0
    length_mean: float = math.nan
    length_min: int = 0
    length_max: int = 0
    n_terminated: int = 0
    terminated_length_mean: float = math.nan
    terminated_length_min: int = 0
    terminated_length_max: int = 0
    kept_tokens: int = 0
    kept_length_mean: float = math.nan
    kept_length_max: int = 0
    stale_length_mean: float = math.nan
    truncated_share: float = math.nan
    kept_truncated_share: float = math.nan
    prompt_tokens: int = 0
    oldest_version: int = -1
    kept_oldest_version: int = -1
    parts_mean: dict[str, float] = field(default_factory=dict)
    parts_count: dict[str, int] = field(default_factory=dict)
    parts_squares: dict[str, float] = field(default_factory=dict)
    kept_parts_mean: dict[str, float] = field(default_factory=dict)

    @property
    def n_whole(self) -> int:
        """Finished rollouts that were not aborted."""
        return self.n_finished - self.n_aborted

    @property
    def n_excluded(self) -> int:
        """Finished rollouts without a reward that selection can use."""
        return self.n_nan + self.n_infinite + self.n_aborted


class GroupArrays(Protocol):
    """The part of a `GroupAssembler` that statistics are computed from. Arrays are by rollout index."""

    size: int
    issued: int
    first: int
    settled: bool
    prompt_tokens: int
    reported_lost: int
    n_finished: int
    n_worker_lost: int
    rewards: Float64[np.ndarray, " size"]
    lengths: Int32[np.ndarray, " size"]
    first_versions: Int32[np.ndarray, " size"]
    truncated: Bool[np.ndarray, " size"]
    parts: dict[str, Float64[np.ndarray, " size"]]


def group_stats(group: GroupArrays, finished: Mask, usable: Mask, fresh: Mask, outcome: Outcome | None) -> GroupStats:
    """Compute the statistics of a group.

    The `fresh` rollouts are among the `usable` (not aborted), those among the `finished`; `outcome` is the selection
    among the fresh ones, None where nothing was selected.
    """
    n, n_finished = group.size, group.n_finished
    stats = GroupStats(size=n, n_finished=n_finished, prompt_tokens=group.prompt_tokens, settled=group.settled)
    stats.n_unissued = n - group.issued
    stats.n_pending = max(0, group.issued - n_finished - group.n_worker_lost - group.reported_lost)
    stats.n_lost = group.issued - n_finished - stats.n_pending
    if n_finished == 0:
        return stats
    n_usable = n_finished if usable is None else int(np.count_nonzero(usable))
    n_fresh = n_finished if fresh is None else int(np.count_nonzero(fresh))
    stats.n_aborted = n_finished - n_usable
    stats.n_stale = n_usable - n_fresh
    rewards = _masked(group.rewards, fresh)
    stats.n_valid = outcome.n_valid if outcome is not None else int(np.count_nonzero(np.isfinite(rewards)))
    if stats.n_valid < n_fresh:
        stats.n_infinite = int(np.count_nonzero(np.isinf(rewards)))
        stats.n_nan = n_fresh - stats.n_valid - stats.n_infinite
    if outcome is not None and stats.n_valid == n_finished:
        stats.reward_mean, stats.reward_std = outcome.group_mean, outcome.group_std
    else:
        rewards = _masked(group.rewards, finished)
        rewards = rewards[np.isfinite(rewards)]
        stats.reward_mean, stats.reward_std, _ = moments(rewards)
    if len(rewards):
        stats.reward_min, stats.reward_max = float(rewards[rewards.argmin()]), float(rewards[rewards.argmax()])
    if n_usable:
        _add_lengths(stats, _masked(group.lengths, usable), _masked(group.truncated, usable))
    if n_usable < n_finished:
        every = int(np.add.reduce(_masked(group.lengths, finished), dtype=np.int64))
        stats.tokens, stats.aborted_tokens = every, every - stats.tokens
    if group.settled and n_usable:
        stats.tokens_saved = stats.n_unissued * stats.length_mean + stats.n_aborted * stats.tokens / n_usable
    if group.first < n:
        rewards = np.where(True if finished is None else finished, group.rewards, np.nan)[: group.first]
        rewards = rewards[np.isfinite(rewards)]
        stats.first_valid, stats.first_mean = len(rewards), moments(rewards)[0]
    stats.oldest_version = _least(_masked(group.first_versions, finished))
    for name, values in group.parts.items():
        count, stats.parts_mean[name], squares = _sums(_masked(values, finished))
        stats.parts_count[name], stats.parts_squares[name] = count, squares
    if stats.n_stale and usable is not None and fresh is not None:
        stats.stale_length_mean = float(group.lengths[usable & ~fresh].mean())
    if outcome is not None and len(outcome.kept):
        _add_kept(stats, group, outcome)
    return stats


def _add_lengths(
    stats: GroupStats, lengths: Int32[np.ndarray, " usable"], truncated: Bool[np.ndarray, " usable"]
) -> None:
    stats.tokens, stats.length_mean, stats.length_min, stats.length_max = _lengths(lengths)
    n_truncated = int(np.count_nonzero(truncated))
    stats.truncated_share = n_truncated / len(lengths)
    stats.n_terminated = len(lengths) - n_truncated
    if not n_truncated:
        stats.terminated_length_mean = stats.length_mean
        stats.terminated_length_min, stats.terminated_length_max = stats.length_min, stats.length_max
    elif stats.n_terminated:
        ended = _lengths(lengths[~truncated])
        _, stats.terminated_length_mean, stats.terminated_length_min, stats.terminated_length_max = ended


def _add_kept(stats: GroupStats, group: GroupArrays, outcome: Outcome) -> None:
    kept = outcome.kept
    stats.n_kept = len(kept)
    stats.no_signal = outcome.fate is Fate.NO_SIGNAL
    stats.kept_mean, stats.kept_std = outcome.kept_mean, outcome.kept_std
    stats.kept_tokens, stats.kept_length_mean, _, stats.kept_length_max = _lengths(group.lengths[kept])
    stats.kept_truncated_share = int(np.count_nonzero(group.truncated[kept])) / len(kept)
    stats.kept_oldest_version = _least(group.first_versions[kept])
    stats.kept_parts_mean = {name: _mean(values[kept]) for name, values in group.parts.items()}


def _masked(values: Shaped[np.ndarray, " size"], mask: Mask) -> Any:
    return values if mask is None else values[mask]


def _least(values: Int32[np.ndarray, " n"]) -> int:
    return int(values[values.argmin()])


def _lengths(lengths: Int32[np.ndarray, " n"]) -> tuple[int, float, int, int]:
    """Return sum (in 64 bits), mean, minimum and maximum."""
    total = int(np.add.reduce(lengths, dtype=np.int64))
    return total, total / len(lengths), int(lengths[lengths.argmin()]), int(lengths[lengths.argmax()])


def _sums(values: Float64[np.ndarray, " n"]) -> tuple[int, float, float]:
    """Return count and mean of the finite values, and the sum of squared distances from the mean; NaN without any."""
    mean = float(np.add.reduce(values)) / len(values)
    if not math.isfinite(mean):
        values = values[np.isfinite(values)]
        if not len(values):
            return 0, math.nan, math.nan
        mean = float(np.add.reduce(values)) / len(values)
    centred = values - mean
    return len(values), mean, float(centred.dot(centred))


def _mean(values: Float64[np.ndarray, " n"]) -> float:
    """Return the mean of the finite values; NaN without any."""
    mean = float(np.add.reduce(values)) / len(values)
    if math.isfinite(mean):
        return mean
    values = values[np.isfinite(values)]
    return float(np.add.reduce(values)) / len(values) if len(values) else math.nan
