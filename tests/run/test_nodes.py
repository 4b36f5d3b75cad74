"""A run on a Ray cluster of four hosts with addresses of their own; a host is lost, and the run goes on with what is left."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import configuration
from benchmarks.node_network import NodeNetwork, usable
from benchmarks.ray_nodes import RayNodes
from tests.tiny_run import Made

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not usable(), reason="network namespaces cannot be made here")]
POOLS = {"generate": ("generate", 1), "learn1": ("learn", 1), "learn2": ("learn", 2)}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """A head without CPUs, nodes for a generator, a learner rank and two of them, and a host `outside` that is no node."""
    with (
        tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        NodeNetwork() as net,
    ):
        nodes = RayNodes(net, Path(folder))
        hosts = {name: net.add(name) for name in ("head", *POOLS, "outside")}
        try:
            nodes.start_head(hosts["head"])
            for name, (pool, cpus) in POOLS.items():
                nodes.join(hosts[name], {"pool": pool}, cpus)
            nodes.wait(4)
            yield nodes
        finally:
            nodes.end()


def test_pools_on_four_hosts_outlive_one_with_two_workers(nodes: RayNodes, made: Made) -> None:
    hosts = nodes.network.hosts
    config = configuration(made.model, made.train, nodes.folder / "runs", engine="paced", workers=1)
    config["selector"]["no_signal"] = "keep"
    config["learner"] |= {"workers": 3, "prompts_per_step": 4, "warmup_steps": 0}
    config["weights"]["verify"] = True
    config["run"]["checkpoint"]["copy_every"] = 1
    run = nodes.submit(hosts["outside"], config)
    run.wait("the first steps", lambda: len(run.rows()) >= 3)
    assert run.places() == {
        "controller": ["head"],
        "selector": ["head"],
        "generator": ["generate"],
        "learner": ["learn1", "learn2", "learn2"],
    }
    hosts["learn2"].kill()
    run.wait("the run goes on", lambda: run.events("restarted") and run.rows()[-1]["learner/workers"] == 1)
    run.wait_for_steps(1)
    assert run.places()["learner"] == ["learn1"]
    nodes.pods(hosts["head"], "stop", str(run.folder.path))
