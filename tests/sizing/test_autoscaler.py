"""What a run asks of Ray's autoscaler, as the autoscaler reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get

from pods_cluster.client.demo import CONFIG
from pods_cluster.config import load_config
from pods_cluster.run.cluster import hint_autoscaler
from pods_cluster.sizing.moves import Sizes
from tests.ray_cluster import RayCluster


def asked(sizes: Sizes | None) -> Any:
    config = load_config(CONFIG, ["data.eval=null", "run.eval.every=0", "generator.cpus_per_worker=2"])
    hint_autoscaler(config, sizes)
    return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"null")


@pytest.mark.slow  # a Ray cluster of its own
def test_a_cluster_with_two_worker_groups_is_asked_for_both_and_one_without_for_nothing(
    ray_cluster: RayCluster,
) -> None:
    """For two generators and one learner, and when that is over."""
    ray_cluster.use(pods_generator=1, pods_learner=1)
    generator, learner = {"CPU": 2.0, "pods_generator": 1.0}, {"CPU": 1.0, "pods_learner": 1.0}
    assert asked(Sizes(2, 1)) == [generator, generator, learner]
    assert asked(None) == []
    ray_cluster.use()
    assert asked(Sizes(2, 1)) is None
    assert asked(None) is None
