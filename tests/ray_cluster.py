"""The local Ray cluster of a test process, which the tests of all folders share: its start takes a core six seconds."""

from __future__ import annotations

import contextlib
import gc
import os

import ray

from pods_cluster.actor_names import NAMESPACE
from pods_cluster.run.ray_access import without_onlookers
from tests import warm_workers

CPUS = 8
"""Slots, not cores: the actors of a test take turns."""
ATTEMPTS = 3
"""Ray gives its own start 30 seconds, which a busy machine may not keep."""


class RayCluster:
    """At most one cluster at a time, of this process alone."""

    def __init__(self) -> None:
        self._has: tuple[int, dict[str, float]] | None = None

    def use(self, cards: int = 0, **resources: float) -> None:
        """A cluster with these GPUs, on which nobody computes, and custom resources (as an autoscaler
        has them, which is there then): the one that is up, if it has just these.
        """
        if self._has == (cards, resources):
            return
        self.close()
        os.environ["RAY_AUTH_MODE"] = "disabled"
        os.environ.pop("RAY_ADDRESS", None)
        warm_workers.restore_settings()
        for attempt in range(ATTEMPTS):
            try:
                with contextlib.nullcontext() if resources else without_onlookers():
                    ray.init(
                        address="local",
                        num_cpus=CPUS,
                        num_gpus=cards,
                        resources=resources,
                        namespace=NAMESPACE,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="error",
                    )
                break
            except Exception:
                ray.shutdown()
                if attempt == ATTEMPTS - 1:
                    raise
        self._has = cards, resources

    def close(self) -> None:
        if self._has is None:
            return
        ray.shutdown()
        self._has = None
        os.environ.pop("RAY_AUTH_MODE", None)
        # Ray gives the actors of a process's next cluster the ids of the last one: a handle from there that is
        # collected late would end its namesake.
        gc.collect()
