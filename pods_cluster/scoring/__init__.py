"""Rollouts to rewards: reward functions, and a pool of killable processes that runs them."""

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
