"""The way of a run's weights, as its configuration and its cluster have it."""

from __future__ import annotations

import ray

from pods_cluster.config import Config
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.run.cluster import nccl_can_reach
from pods_cluster.weights.broadcast import Broadcaster


def publisher_of(config: Config, learners: LearnerGroup) -> Broadcaster:
    """A broadcaster from the ranks of a group that has started."""
    return Broadcaster(
        learners.handles,
        config.weights,
        config.run.name,
        gpus=nccl_can_reach(config, ray.cluster_resources().get("GPU", 0.0)),
        ranks_per_worker=config.generator.tensor_parallel,
    )
