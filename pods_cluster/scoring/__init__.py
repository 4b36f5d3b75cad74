"""Rollouts to rewards: reward functions, and a pool of killable processes that runs them."""

from pods_cluster.scoring.combine import combine, total_range
from pods_cluster.scoring.pool import ScorerPool
from pods_cluster.scoring.process import ScorerStartError
from pods_cluster.scoring.records import FailureKind, Score, ScoreFailure, ScoreRequest
from pods_cluster.scoring.registry import check_rewards, declared_range
from pods_cluster.scoring.spec import RewardConfigError, RewardSpec
from pods_cluster.scoring.stats import ScorerStats

__all__ = [
    "FailureKind",
    "RewardConfigError",
    "RewardSpec",
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
