"""A second Ray node with a label: workers go there alone, and it, or one of them, is seen to leave when it gets SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from pods_cluster.config import Config
from pods_cluster.generation.node_notice import draining_nodes
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.rank_room import find_room, give_back, in_room
from pods_cluster.run.cluster import lacking_places

pytestmark = pytest.mark.usefixtures("cluster")
SECONDS = 60.0


@pytest.fixture
def cheap_node() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A node with the label `pool: cheap` beside the cluster's own; its id, and the process that keeps it."""
    before = {node["NodeID"] for node in ray.nodes()}
    address = ray.get_runtime_context().gcs_address
    ray_command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=2"]
    environment = os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "30"}
    process = subprocess.Popen(
        [*ray_command, "--labels=pool=cheap", "--block", "--disable-usage-stats"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (new := {node["NodeID"] for node in ray.nodes() if node["Alive"]} - before):
            assert process.poll() is None, "the node did not start"
            assert time.monotonic() < deadline, "the node did not join"
            time.sleep(0.1)
        yield new.pop(), process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
        process.wait()


async def warnings(pool: GeneratorPool, of: str | None = None) -> dict[str, float | None]:
    """Who is about to go, once someone (`of`: this worker) is."""
    deadline = time.monotonic() + SECONDS
    while not (warned := await pool.warned()) or (of is not None and of not in warned):
        assert time.monotonic() < deadline, "the notice was not heard"
        await asyncio.sleep(0.1)
    return warned


class Here:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def together(labels: dict[str, str]) -> None:
    """Two actors in a room for two are on one node, and end with it."""
    room = find_room(2, {"CPU": 1.0}, labels)
    assert room is not None, "there are two nodes to choose from"
    actors: list[Any] = [
        ray.remote(Here).options(num_cpus=1.0, **in_room(room, bundle)).remote()  # pyright: ignore
        for bundle in range(2)
    ]
    assert len(set(ray.get([actor.node.remote() for actor in actors], timeout=SECONDS))) == 1
    give_back(room)
    with pytest.raises(ray.exceptions.RayActorError):
        use(actors[0])


def use(actor: Any) -> None:
    """Call an actor as long as it lives: a room is given back in the background."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ray.get(actor.node.remote(), timeout=SECONDS)
        time.sleep(0.05)


def test_workers_go_where_they_are_placed_and_are_warned_of_its_end(
    make_config: Callable[..., Config], cheap_node: tuple[str, subprocess.Popen[bytes]]
) -> None:
    node, process = cheap_node
    config = make_config(engine="paced", workers=2, place={"pool": "cheap"}, cpus_per_worker=1.0)
    assert list(lacking_places(config, ray.nodes())) == []
    assert find_room(2, {"CPU": 1.0}, {"pool": "cheap"}) is None, "on one node there is nothing to choose"
    for labels in ({}, {"pool": "!other"}):
        together(labels)

    async def run() -> None:
        pool = GeneratorPool(config, None)
        try:
            await pool.start()
            members = pool._members.values()
            assert {member.info.node for member in members} == {node}
            assert all("pool: cheap" in member.info.kind for member in members)
            assert await pool.warned() == {}
            first, second = pool._members.values()
            os.kill(first.info.pid, signal.SIGTERM)
            assert await warnings(pool) == {first.info.name: None}
            assert (await pool.all_stats()).keys() == pool.workers.keys(), "a process that is told to go serves on"
            os.kill(process.pid, signal.SIGTERM)
            warned = await warnings(pool, of=second.info.name)
            assert warned.keys() == pool.workers.keys()
            assert all(seconds is not None and 0 < seconds <= 30 for seconds in warned.values())
            assert set(draining_nodes()) == {node}
            pool.retire_workers(list(warned))
            assert await pool.warned() == {}
        finally:
            await pool.close()

    asyncio.run(run())
