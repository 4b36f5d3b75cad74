"""Advantages of the kept rollouts, from their rewards."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from jaxtyping import Float64

EPSILON = 1e-4
"""Added to the standard deviation, as in the code of PODS (arXiv 2504.13818) and of TRL."""

Scope = Literal["kept", "group"]


def advantages(
    rewards: Float64[np.ndarray, " kept"],
    *,
    scope: Scope = "kept",
    normalize: bool = True,
    group_mean: float = math.nan,
    group_std: float = math.nan,
) -> Float64[np.ndarray, " kept"]:
    """Advantages (r - mean) / (std + 1e-4) of the kept rewards r.

    Mean and sample deviation (ddof 1) are those of the kept rewards (scope `kept`: PODS normalises after the
    selection), or the given ones of the whole group (scope `group`). Without `normalize` only the mean is subtracted.
    Equal rewards give exact zeros with scope `kept`, also where their mean cannot be represented.

    Raises ValueError for rewards that are not finite, and for scope `group` without the group's mean and deviation.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"rewards: an array of shape {values.shape} was given; one reward a kept rollout is needed")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards: {values[~np.isfinite(values)][0]} is not finite; such rollouts are never kept")
    if scope == "group":
        if not (math.isfinite(group_mean) and (math.isfinite(group_std) or not normalize)):
            raise ValueError(
                f"group_mean: {group_mean}, group_std: {group_std} must be finite with advantage.scope: group"
            )
        centred = values - group_mean
        return centred / (group_std + EPSILON) if normalize else centred
    if values.max() == values.min():
        return np.zeros(len(values))
    # Subtract one of the values first: a large common offset would cost the digits that tell the rewards apart.
    shifted = values - values[0]
    centred = shifted - shifted.mean()
    if not normalize:
        return centred
    return centred / (math.sqrt(float(centred @ centred) / (len(values) - 1)) + EPSILON)
