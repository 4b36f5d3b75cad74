"""The configuration of a run: one pydantic tree. Imports no torch, ray or vllm."""

from pods_cluster.config.base import ConfigError
from pods_cluster.config.environment import EnvironmentConfig
from pods_cluster.config.learner import AdvantageConfig, CorrectionConfig, KLConfig, LearnerConfig, LoraConfig
from pods_cluster.config.load import build_config, dump_config, load_config, parse_config
from pods_cluster.config.model_data import DataConfig, EvalDataConfig, MixedDataConfig, ModelConfig
from pods_cluster.config.pools import GeneratorConfig, SelectorConfig, WeightsConfig
from pods_cluster.config.reward import RewardConfig, RewardConfigError, ScoringConfig
from pods_cluster.config.run_settings import CheckpointConfig, ClusterConfig, EvalConfig, RunConfig
from pods_cluster.config.tree import Config

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalDataConfig",
    "GeneratorConfig",
    "KLConfig",
    "LearnerConfig",
    "LoraConfig",
    "MixedDataConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardConfigError",
    "RunConfig",
    "ScoringConfig",
    "SelectorConfig",
    "WeightsConfig",
    "build_config",
    "dump_config",
    "load_config",
    "parse_config",
]
