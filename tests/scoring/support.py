"""Rewards as a YAML file would give them."""

from __future__ import annotations

from typing import Any

from pods_cluster.config import RewardConfig


def reward(name: str, **fields: Any) -> RewardConfig:
    return RewardConfig(name=name, **fields)
