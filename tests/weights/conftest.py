"""One set of actors for all tests of the weights' way: they are slow to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.ray_cluster import RayCluster
from tests.weights import weight_parts
from tests.weights.weight_cluster import Cluster


@pytest.fixture(scope="package")
def cluster(ray_cluster: RayCluster) -> Iterator[Cluster]:
    ray.cloudpickle.register_pickle_by_value(weight_parts)
    ray_cluster.use()
    cluster = Cluster()
    yield cluster
    cluster.close()
