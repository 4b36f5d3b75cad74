"""A run on a Ray cluster of four hosts with addresses of their own: one is drained, one with workers of both pools is cut off (or
killed, where hosts are processes), and the run goes on with what is left.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import GENERATES, LEARNS, configuration
from benchmarks.ray_nodes import RayNodes, hosts_of_this_system
from tests import warm_workers
from tests.tiny_run import Made

pytestmark = pytest.mark.slow
FAST, SLOW = {"card": "fast"}, {"card": "slow"}
NODES = {
    "mixed1": (GENERATES | LEARNS | SLOW, 1, 2),
    "mixed2": (GENERATES | LEARNS | FAST, 1, 1),
    "generate": (GENERATES | SLOW, 1, 0),
}
"""Labels, and room for generators and ranks."""
RATES = {"fast": 120.0, "slow": 30.0}
"""So low that the machine is not busy with steps while commands are waited for; what is left after all losses is fast."""


@pytest.fixture
def nodes(record_property: Callable[[str, object], None]) -> Iterator[RayNodes]:
    """A head without CPUs, the nodes of NODES, and a host `outside` that is no node: network namespaces, or processes where
    these cannot be made or PODS_TEST_NODES=processes asks for them."""
    network = hosts_of_this_system(True if os.environ.get("PODS_TEST_NODES") == "processes" else None)
    record_property("measured", f"tests/run/test_nodes.py: the hosts were {network.kind}")
    with (
        tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        network,
    ):
        nodes = RayNodes(network, Path(folder))
        nodes.environment["REPORTER_UPDATE_INTERVAL_MS"] = "60000"  # what Ray's dashboard shows is not looked at
        if network.own_sessions:
            nodes.environment[warm_workers.VARIABLE] = ""  # a fork of the warm process is in that one's session
        hosts = {name: network.add(name) for name in ("head", *NODES, "outside")}
        try:
            nodes.start_head(hosts["head"])
            for name, (labels, generators, ranks) in NODES.items():
                nodes.join(hosts[name], labels, generators=generators, ranks=ranks)
            nodes.wait()
            yield nodes
        finally:
            nodes.end()


def test_a_run_on_four_hosts_outlives_the_loss_of_one_with_a_generator_and_two_learner_ranks(
    nodes: RayNodes, made: Made, record_property: Callable[[str, object], None]
) -> None:
    hosts = nodes.network.hosts
    config = configuration(made.model, made.train, nodes.folder / "runs", engine="paced", workers=3)
    config["generator"]["engine_options"] = {"tokens_per_second": {"card": RATES}, "shortest": 4, "longest": 6}
    config["selector"]["no_signal"] = "keep"
    config["learner"] |= {"workers": 3, "prompts_per_step": 4, "warmup_steps": 0}
    config |= {"staleness": 1}
    if nodes.network.own_sessions:  # their workers are not forks of a warm process
        config["cluster"]["placement_timeout"] = 60.0
    config["weights"]["verify"] = True
    config["run"]["checkpoint"]["copy_every"] = 1
    run = nodes.submit(hosts["outside"], config)

    # pools on different nodes, ranks on two of them; prompts are shared out by what each engine is seen to make
    run.wait_for_steps(5)
    assert run.places() == {
        "controller": ["head"],
        "selector": ["head"],
        "generator": ["generate", "mixed1", "mixed2"],
        "learner": ["mixed1", "mixed1", "mixed2"],
    }
    pids = {host: hosts[host].processes() for host in NODES}
    made_by = {host: worker for worker in run.workers() if worker["role"] == "generator"
               for host in NODES if worker["pid"] in pids[host]}  # fmt: skip
    for slow in (made_by["generate"], made_by["mixed1"]):
        assert made_by["mixed2"]["tokens_per_second"] > 2 * slow["tokens_per_second"] > 0
        assert made_by["mixed2"]["generated_tokens"] > 1.5 * slow["generated_tokens"] > 0

    # a node is drained: its generator leaves, and the others go on with what it has not finished, where there is something just
    # then (tests/sizing/test_scaling.py has such groups for certain)
    began = time.monotonic()
    nodes.drain(made_by["generate"]["node"], 0)
    run.wait("its generator has left", lambda: run.events("generator_left"))
    assert " has left" in run.events("generator_left")[0]["text"]
    run.wait("the others go on", lambda: run.pools() == (2, 3))
    seconds = time.monotonic() - began
    record_property(
        "measured", f"a drained node: its generator had left, and a step was made without it, after {seconds:.1f} s"
    )
    hosts["generate"].kill()

    # a node with workers of both pools is lost
    does = "killed" if nodes.network.own_sessions else "cut off"
    if does == "killed":
        hosts["mixed1"].kill()
    else:  # its processes go on, unheard
        nodes.network.cut(hosts["mixed1"])
    seconds = run.wait("the run goes on", lambda: run.events("restarted") and run.pools() == (1, 1))
    record_property(
        "measured", f"node with a generator and two ranks {does}: the first step after it came after {seconds:.1f} s"
    )
    hosts["mixed1"].kill()
    run.wait_for_steps(1)
    assert (run.places()["generator"], run.places()["learner"]) == (["mixed2"], ["mixed2"])
    steps = {row["step"] for row in run.rows()}  # some are made again
    assert steps == set(range(1, max(steps) + 1)), "no step was left out"
    assert all(row["rollouts/trained"] == 16 for row in run.rows())
    nodes.pods(hosts["head"], "stop", str(run.folder.path))
