"""TRL's names for a run: `from pods_cluster.trl import GRPOConfig, GRPOTrainer`. TRL itself need not be installed."""

from pods_cluster.trl.config import GRPOConfig
from pods_cluster.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
