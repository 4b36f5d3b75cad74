"""One cluster of actors for all tests of the weights' way: they are slow to start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray

from tests.weights import weight_parts
from tests.weights.weight_cluster import Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    ray.cloudpickle.register_pickle_by_value(weight_parts)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="pods")
        cluster = Cluster()
        try:
            yield cluster
        finally:
            for _, pid in [*cluster.idle, *cluster.taken.values()]:
                os.kill(pid, signal.SIGKILL)
            ray.shutdown()
