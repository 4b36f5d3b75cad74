"""Rollouts to rewards: reward functions, and a pool of killable processes that runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pods_cluster.scoring.reward_registry import check_rewards, declared_range
    from pods_cluster.scoring.score import FailureKind, Score, ScoreFailure, ScoreRequest
    from pods_cluster.scoring.scorer_pool import ScorerPool
    from pods_cluster.scoring.scorer_process import ScorerStartError
    from pods_cluster.scoring.scorer_stats import ScorerStats
    from pods_cluster.scoring.total_reward import combine, total_range

__all__ = [
    "FailureKind",
    "Score",
    "ScoreFailure",
    "ScoreRequest",
    "ScorerPool",
    "ScorerStartError",
    "ScorerStats",
    "check_rewards",
    "combine",
    "declared_range",
    "total_range",
]

_MODULES = {
    "reward_registry": ("check_rewards", "declared_range"),
    "score": ("FailureKind", "Score", "ScoreFailure", "ScoreRequest"),
    "scorer_pool": ("ScorerPool",),
    "scorer_process": ("ScorerStartError",),
    "scorer_stats": ("ScorerStats",),
    "total_reward": ("combine", "total_range"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
"""On first use: a scorer process, which is started again after each reward that hangs, imports its own module alone."""


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
