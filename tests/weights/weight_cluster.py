"""A learner of two ranks whose gathers are collectives, and workers that fail: Ray actors around the real transport."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import ray

from pods_cluster.config import WeightsConfig
from pods_cluster.stopped_process import Process
from pods_cluster.weights.broadcast import Broadcaster, PublishReport
from pods_cluster.weights.fingerprint import fingerprints
from tests.weights import weight_parts
from tests.weights.weight_parts import Rank, Worker, make_tensors

WAIT = 60.0
PATIENT = {"rendezvous_timeout": 30.0, "transfer_timeout": 30.0}
SHORT = {"rendezvous_timeout": 8.0, "transfer_timeout": 4.0}


def settings(**fields: Any) -> WeightsConfig:
    return WeightsConfig(transport="gloo", bucket_megabytes=weight_parts.BUCKET / 2**20, **fields)


class Cluster:
    """Actors are slow to start, so that those who are well serve the next test."""

    def __init__(self) -> None:
        self.idle: list[tuple[Any, int]] = []
        self.taken: dict[str, tuple[Any, int]] = {}
        self.learner = self.start_learner()

    def start_learner(self, world_size: int = 2) -> list[Any]:
        # as a rank of the service: one call at a time, so that no gather of a next version comes between those of one before
        actor = ray.remote(num_cpus=0, concurrency_groups={"control": 2})(Rank)
        ranks = [actor.remote(rank, world_size) for rank in range(world_size)]
        port = ray.get(ranks[0].listen.remote(), timeout=WAIT)
        ray.get([rank.join.remote(port) for rank in ranks], timeout=WAIT)
        return ranks

    def workers(self, *names: str) -> dict[str, Any]:
        actor = ray.remote(num_cpus=0, max_concurrency=4)(Worker)
        missing = [actor.remote() for _ in range(len(names) - len(self.idle))]
        self.idle += zip(missing, ray.get([handle.pid.remote() for handle in missing], timeout=WAIT), strict=True)
        new = {name: self.idle.pop() for name in names}
        self.taken |= new
        return {name: handle for name, (handle, _) in new.items()}

    def kill(self, name: str) -> None:
        _, pid = self.taken.pop(name)
        os.kill(pid, signal.SIGKILL)  # a stopped process takes no other

    def close(self) -> None:
        for _, pid in [*self.idle, *self.taken.values()]:
            os.kill(pid, signal.SIGKILL)
        for rank in self.learner:
            ray.kill(rank)

    def give_back(self, *, spent: tuple[str, ...] = ()) -> None:
        for name in spent:
            self.kill(name)
        for handle, _ in self.taken.values():
            ray.get([handle.fault.remote(), handle.disconnect.remote()], timeout=WAIT)
        self.idle += self.taken.values()
        self.taken = {}


def broadcaster(
    cluster: Cluster, grace: float = 5.0, process_of: Callable[[str], Process | None] | None = None, **fields: Any
) -> Broadcaster:
    return Broadcaster(cluster.learner, settings(**(fields or PATIENT)), "run", grace=grace, process_of=process_of)


def step(cluster: Cluster, version: int, sleep: float = 0.0) -> None:
    ray.get([rank.step.remote(version, sleep) for rank in cluster.learner], timeout=WAIT)


def publish(caster: Broadcaster, cluster: Cluster, version: int, workers: dict[str, Any]) -> PublishReport:
    step(cluster, version)
    return asyncio.run(caster.publish(version, workers))


def holds(worker: Any, version: int) -> None:
    """All of this version, open, and bit for bit that of the learner."""
    assert ray.get(worker.state.remote(), timeout=WAIT) == (version, False)
    assert ray.get(worker.fingerprints.remote(), timeout=WAIT) == fingerprints(make_tensors(version))


def alive(cluster: Cluster) -> None:
    """Both learner ranks still go in step: as many gathers on each, and none is stuck in one."""
    counts = ray.get([rank.gathers.remote() for rank in cluster.learner], timeout=WAIT)
    assert counts[0] == counts[1] > 0
