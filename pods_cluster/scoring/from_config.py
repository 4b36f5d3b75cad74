"""The `reward:` section as the specs that scorers take."""

from __future__ import annotations

from collections.abc import Sequence

from pods_cluster.config import RewardConfig
from pods_cluster.scoring.spec import RewardSpec


def reward_specs(rewards: Sequence[RewardConfig]) -> list[RewardSpec]:
    """One spec for each entry of `reward:`, in order."""
    return [
        RewardSpec(
            name=reward.name,
            weight=reward.weight,
            label=reward.label,
            style=reward.style,
            timeout_s=reward.timeout,
            range=reward.range,
            none=reward.none,
            batch=reward.batch,
            completions=reward.completions,
            options=dict(reward.options),
        )
        for reward in rewards
    ]
