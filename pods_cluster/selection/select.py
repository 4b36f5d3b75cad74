"""Selection of one group: exclude unusable rewards, apply the rule, compute statistics, look for a signal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from pods_cluster.selection.rule_registry import Rule, resolve
from pods_cluster.selection.rules import Indices, RuleContext, Weights, group_rng
from pods_cluster.types import Fate, GroupId

NO_SIGNAL_SPREAD = 1e-8
"""Largest spread (max - min) of rewards that still counts as all equal."""

SignalScope = Literal["kept", "group"]


@dataclass(slots=True)
class Outcome:
    """The result of selecting in one group.

    `kept` are indices of rollouts, in rising order. `fate` is None for a group to train on. With `Fate.NO_SIGNAL`,
    `kept` still holds what the rule chose, for runs that train on it all the same; with `Fate.TOO_FEW_VALID` it is
    empty. `group_*` are over all valid rewards, `kept_*` over the kept ones; deviations are sample deviations (ddof 1),
    0 for a single reward; means and deviations over nothing are NaN. `spread` is max - min over the rewards that decide
    whether there is a signal: those of the kept set, with scope `group` those of the group.
    """

    kept: Indices
    fate: Fate | None
    n: int
    n_valid: int
    n_missing: int
    n_nan: int
    n_infinite: int
    group_mean: float
    group_std: float
    kept_mean: float
    kept_std: float
    spread: float
    weights: Weights | None = None
    """Weight of each of `kept` in the loss, where the rule weights (`Weighted`)."""

    @property
    def n_excluded(self) -> int:
        """Rollouts that were excluded because their reward was missing, NaN or infinite."""
        return self.n - self.n_valid


def moments(values: Float64[np.ndarray, " n"]) -> tuple[float, float, float]:
    """Return mean, sample standard deviation (ddof 1) and spread (max - min), by two passes in float64.

    The deviation of one value is 0. Without any value the result is (NaN, NaN, 0).
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan, 0.0
    high, low = float(values[values.argmax()]), float(values[values.argmin()])
    scale = max(high, -low)
    if scale > 1e150:  # the sum or the squares could overflow
        values = values / scale
    else:
        scale = 1.0
    mean = float(np.add.reduce(values)) / n
    centred = values - mean
    std = math.sqrt(float(centred.dot(centred)) / (n - 1)) if n > 1 else 0.0
    return mean * scale, std * scale, high - low


def _as_floats(
    rewards: Float64[np.ndarray, " n"] | Sequence[float | None],
) -> tuple[Float64[np.ndarray, " n"], int]:
    """Convert rewards to an array with NaN for None, and count the None."""
    if isinstance(rewards, np.ndarray) and rewards.dtype == np.float64 and rewards.ndim == 1:
        return rewards, 0
    missing = 0 if isinstance(rewards, np.ndarray) else sum(reward is None for reward in rewards)
    try:
        values = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rewards: {rewards!r} are not numbers; a reward is a number, or None where it failed"
        ) from error
    if values.ndim != 1:
        raise ValueError(
            f"rewards: an array of shape {values.shape} was given; one reward a rollout, shape (n,), is needed"
        )
    return values, missing


def select(
    rewards: Float64[np.ndarray, " n"] | Sequence[float | None],
    m: int,
    rule: Rule | str,
    seed: int,
    group: GroupId,
    *,
    min_valid: int | None = None,
    no_signal_scope: SignalScope = "kept",
    lengths: Int32[np.ndarray, " n"] | None = None,
    truncated: Bool[np.ndarray, " n"] | None = None,
    parts: Mapping[str, Float64[np.ndarray, " n"]] | None = None,
    prompt_tokens: int = 0,
) -> Outcome:
    """Choose the m rollouts of `group` to train on.

    All arrays are by rollout index. `rewards` may hold NaN, infinity and None: those are excluded before the selection
    and counted. With fewer than m valid rewards all of them are kept, as long as there are `min_valid` (default m);
    below that the fate is TOO_FEW_VALID. A kept set (scope `group`: a group) whose spread is at most
    `NO_SIGNAL_SPREAD` has the fate NO_SIGNAL. The other arrays are for rules that use more than rewards. The result is
    a function of (seed, group, the arrays) only.

    Raises ValueError for rewards that are no numbers or an m below 1, RuleError when a rule raises or returns
    something other than m distinct indices, UnknownRuleError for a name that is no rule.
    """
    if m < 1:
        raise ValueError(f"m: {m} rollouts cannot be kept; selector.keep must be at least 1")
    values, missing = _as_floats(rewards)
    n = len(values)
    valid: Int64[np.ndarray, " n_valid"] | None = None  # None: all of them
    infinite = 0
    usable = values
    finite = np.isfinite(values)
    n_valid = int(np.count_nonzero(finite))
    if n_valid < n:
        infinite = int(np.count_nonzero(np.isinf(values)))
        valid = np.flatnonzero(finite)
        usable = values[valid]
    mean, std, group_spread = moments(usable)
    counts = (n, n_valid, missing, n - n_valid - infinite - missing, infinite)
    if n_valid == 0 or n_valid < (m if min_valid is None else min_valid):
        nothing = np.empty(0, dtype=np.intp)
        return Outcome(nothing, Fate.TOO_FEW_VALID, *counts, mean, std, math.nan, math.nan, group_spread)

    weights: Weights | None = None
    if n_valid <= m:
        kept = np.arange(n_valid)
    else:
        chosen = resolve(rule) if isinstance(rule, str) else rule
        context = RuleContext(group, seed)
        if not chosen.reads_rewards_only:
            context = RuleContext(
                group=group,
                seed=seed,
                indices=np.arange(n) if valid is None else valid,
                lengths=lengths if lengths is None or valid is None else lengths[valid],
                truncated=truncated if truncated is None or valid is None else truncated[valid],
                parts=_parts(parts, valid),
                prompt_tokens=prompt_tokens,
            )
        kept, weights = chosen.choose(usable, m, group_rng(seed, group), context)
    kept_rewards = usable[kept]
    kept_mean, kept_std, spread = moments(kept_rewards)
    if no_signal_scope == "group":
        spread = group_spread
    fate = Fate.NO_SIGNAL if spread <= NO_SIGNAL_SPREAD else None
    if valid is not None:
        kept = valid[kept]
    return Outcome(kept, fate, *counts, mean, std, kept_mean, kept_std, spread, weights)


def _parts(
    parts: Mapping[str, Float64[np.ndarray, " n"]] | None, valid: Int64[np.ndarray, " n_valid"] | None
) -> dict[str, Float64[np.ndarray, " n_valid"]] | None:
    if parts is None:
        return None
    return {name: values if valid is None else values[valid] for name, values in parts.items()}
