"""One run on a Ray cluster of four nodes and more: slow links, nodes that join, that are told to go, that are lost.

    make quickstart; sudo python -m benchmarks.cluster --model .cache/quickstart-…

Each node is a host of its own: a network namespace (`benchmarks/node_network.py`; Linux, root), or where these cannot be
made, and with `--processes`, the processes of a loopback address (`node_processes.py`), which have no links to slow down.
The head has controller and selector, one node two generators, two a learner rank each. The run is the quickstart's, sent
by `pods submit` from a host that is no node; `weights.relay: node`. The loop is measured as it is, with a capped and a
delayed link of one rank's node and of the generators' node, then through nodes that come and go. Writes
`benchmarks/results/cluster.json`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.hosts import Host
from benchmarks.node_network import NamespaceHost, NodeNetwork
from benchmarks.ray_nodes import RayNodes, SubmittedRun, hosts_of_this_system

RESULT = Path(__file__).parent / "results" / "cluster.json"
STAGES = ("step", "generate", "fetch", "update", "publish")
GENERATES, LEARNS = {"generate": "yes"}, {"learn": "yes"}
"""Labels of nodes, by which the pools are placed."""
NOTICE = 20
"""Seconds that `ray drain-node` gives a node."""
SLOW = 600.0
"""Seconds for what may wait for Ray to notice that a node is gone, and for processes to start."""


def configuration(model: Path, rows: Path, runs: Path, **generator: Any) -> dict[str, Any]:
    """The quickstart's training, without evaluations and exports, its pools placed by labels."""
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(rows), "prompt": "prompt", "answer": "answer", "max_prompt_tokens": 16},
        "reward": [{"name": "exact_match"}],
        "generator": {"engine": "transformers", "workers": 2, "rollouts_per_prompt": 16, "max_tokens": 6,
                      "max_sequences": 1024, "place": GENERATES, **generator},
        "selector": {"keep": 4},
        "learner": {"workers": 2, "zero_stage": 2, "prompts_per_step": 64, "learning_rate": 3e-4, "warmup_steps": 5,
                    "betas": [0.9, 0.99], "tokens_per_microbatch": 8192, "place": LEARNS},
        "weights": {"relay": "node"},
        "cluster": {"placement_timeout": 20.0},
        "run": {"name": "nodes", "dir": str(runs), "steps": 100000, "samples_every": 0, "export": False,
                "checkpoint": {"every": 0, "minutes": 0, "copy_every": 5}},
    }  # fmt: skip


class Story:
    """The run, and what was written down of it."""

    def __init__(self, run: SubmittedRun, steps: int, phases: list[dict[str, Any]], keep: Callable[[], None]) -> None:
        self.run, self.steps, self.phases = run, steps, phases
        self._keep = keep

    def measure(self, name: str, **about: Any) -> None:
        """Medians of some steps as things are now, after two that are left out; bytes a step of each host."""
        self.run.wait_for_steps(2, SLOW)
        there = self.run.nodes.network.hosts.items()
        hosts = {name: host for name, host in there if isinstance(host, NamespaceHost) and host.processes()}
        before = {name: host.bytes() for name, host in hosts.items()}
        rows = self.run.wait_for_steps(self.steps, SLOW)
        after = {name: host.bytes() for name, host in hosts.items()}
        phase: dict[str, Any] = {"phase": name, **about, "steps": [rows[0]["step"], rows[-1]["step"]]}
        for stage in STAGES:
            phase[stage] = statistics.median(row.get(f"timing_s/{stage}", 0.0) for row in rows)
        phase["reward"] = statistics.mean(row["reward"] for row in rows)
        phase["trained"] = statistics.mean(row["rollouts/trained"] for row in rows)
        phase["pools"] = [int(rows[-1]["generator/workers"]), int(rows[-1]["learner/workers"])]
        if hosts:
            phase["kilobytes_a_step"] = {
                host: [round((after[host][way] - before[host][way]) / len(rows) / 1000) for way in (0, 1)]
                for host in hosts
            }
        self._add(phase)

    def change(self, name: str, do: Callable[[], Any], until: Callable[[], Any]) -> None:
        """Do something to the cluster; seconds until its effect, and until two steps after it."""
        told, made, began = len(self._events()), len(self.run.rows()), time.monotonic()
        do()
        self.run.wait(name, until, SLOW)
        effect, meanwhile = time.monotonic() - began, len(self.run.rows()) - made
        self.run.wait_for_steps(2, SLOW)
        self._add({
            "change": name,
            "seconds_to_effect": effect,
            "steps_meanwhile": meanwhile,
            "seconds_to_two_steps": time.monotonic() - began,
            "events": [f"{event['kind']}: {event['text']}" for event in self._events()[told:]],
            "places": self.run.places(),
        })  # fmt: skip

    def cut(self, name: str, node: str, until: Callable[[], Any]) -> None:
        """Cut a node off, whose processes go on; seconds until the next step, until the second one, and until `until`."""
        network, made = self.run.nodes.network, len(self.run.rows())
        told = len(self._events())
        network.cut(network.hosts[node])
        cut, began = time.time(), time.monotonic()
        steps = []
        for more in (1, 2):
            self.run.wait(name, lambda more=more: len(self.run.rows()) >= made + more, SLOW)
            steps.append(time.monotonic() - began)
        self.run.wait(name, until, SLOW)
        self._add({
            "cut_off": name,
            "seconds_to_first_step": steps[0],
            "seconds_to_two_steps": steps[1],
            "seconds_to_effect": time.monotonic() - began,
            "events": [f"{event['time'] - cut:.1f} s {event['kind']}: {event['text']}" for event in self._events()[told:]],
            "places": self.run.places(),
        })  # fmt: skip
        network.hosts[node].kill()
        self.run.wait_for_steps(2, SLOW)

    def _events(self) -> list[dict[str, Any]]:
        lines = self.run.folder.events.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _add(self, phase: dict[str, Any]) -> None:
        self.phases.append(phase)
        print(json.dumps(phase), flush=True)
        self._keep()

    def pools(self, generators: int, learners: int) -> Callable[[], bool]:
        """Whether the newest step was made by pools of these sizes."""

        return lambda: self.run.pools() == (generators, learners)


def links(story: Story, nodes: RayNodes, hosts: dict[str, Host]) -> None:
    """Slow links."""
    network, run = nodes.network, story.run
    assert isinstance(network, NodeNetwork), "processes of one machine have no links of their own"
    learn1 = hosts["learn1"]
    there = network.round_trip(hosts["learn2"], learn1)
    story.measure("four nodes", places=run.places(), round_trip_ms=there)
    for host, title in ((hosts["learn2"], "a rank's link"), (hosts["generate1"], "the generators' link")):
        for megabits in (100, 20):
            network.cap(host, megabits)
            story.measure(f"{title}: {megabits} Mbit/s", megabits=megabits)
        network.cap(host, 0)
        for milliseconds in (5, 25):
            network.delay(host, milliseconds)
            there = network.round_trip(host, learn1)
            story.measure(f"{title}: {2 * milliseconds} ms there and back", round_trip_ms=there)
        network.delay(host, 0)
    story.measure("four nodes again")


def changes(story: Story, nodes: RayNodes, hosts: dict[str, Host]) -> None:
    """Nodes that come and go."""
    network, run, head = nodes.network, story.run, hosts["head"]

    def another(name: str, *sizes: str, ranks: int = 0) -> None:
        labels = GENERATES | (LEARNS if ranks else {})
        nodes.join(network.add(name), labels, generators=1 if ranks else 2, ranks=ranks)
        if sizes:
            nodes.pods(head, "scale", str(run.folder.path), *sizes)

    def lose(name: str) -> None:
        network.cut(network.hosts[name])
        network.hosts[name].kill()

    def drain(name: str) -> None:
        pids = network.hosts[name].processes()
        nodes.drain(next(worker["node"] for worker in run.workers() if worker["pid"] in pids), NOTICE)

    def left(name: str) -> Callable[[], bool]:
        return lambda: name not in run.places().get("generator", [])

    story.change(
        "a node for two generators joins",
        partial(another, "generate2", "--generators", "4"),
        story.pools(4, 2),
    )
    story.measure("five nodes")
    story.change("a generators' node is drained by Ray", partial(drain, "generate1"), left("generate1"))
    network.hosts["generate1"].kill()  # who drains a node ends it
    story.change("another one joins", partial(another, "generate3"), story.pools(4, 2))
    told = partial(nodes.preempt, network.hosts["generate2"])
    story.change("a generators' node gets SIGTERM", told, left("generate2"))
    story.change("yet another one joins", partial(another, "generate4"), story.pools(4, 2))
    story.change("a generators' node is lost", partial(lose, "generate3"), story.pools(2, 2))
    story.change("a rank's node is lost", partial(lose, "learn2"), story.pools(2, 1))
    story.change(
        "a node for a generator and a rank joins",
        partial(another, "both", "--generators", "3", "--learners", "2", ranks=1),
        story.pools(3, 2),
    )
    story.change("a node with a generator and a rank is lost", partial(lose, "both"), story.pools(2, 1))
    story.measure("what is left")


def cut_off(story: Story, nodes: RayNodes, _: dict[str, Host]) -> None:
    """Nodes whose processes go on, and that nothing reaches any more."""
    run, network = story.run, nodes.network
    nodes.join(network.add("spare"), GENERATES, generators=2)
    nodes.wait()
    run.wait_for_steps(2, SLOW)
    story.cut("a rank's node", "learn2", story.pools(2, 1))
    nodes.join(network.add("learn3"), LEARNS, ranks=1)
    run.wait("the learner group has its size again", story.pools(2, 2), SLOW)
    run.wait_for_steps(2, SLOW)

    def both_there() -> bool:  # those of before go on too, unheard
        return run.places().get("generator", []).count("spare") == 2

    story.cut("the node of all generators", "generate1", both_there)


PARTS = {"links": links, "changes": changes, "cut_off": cut_off}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder that the quickstart made (model, data)")
    parser.add_argument("--steps", type=int, default=8, help="of a phase")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="others keep their results")
    parser.add_argument("--processes", action="store_true", help="no network namespaces, also where they can be made")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    network = hosts_of_this_system(options.processes or None)
    if not isinstance(network, NodeNetwork) and "links" in options.parts:
        print("no slow links: network namespaces need root (and Linux)")
        options.parts.remove("links")
    made = options.model.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces and nodes would be left behind
    found = json.loads(options.out.read_text()) if options.out.exists() else {}

    with (
        tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp", ignore_cleanup_errors=True) as scratch,
        network,
    ):
        nodes = RayNodes(network, Path(scratch))
        hosts = {name: network.add(name) for name in ("head", "generate1", "learn1", "learn2", "outside")}
        try:
            nodes.start_head(hosts["head"])
            nodes.join(hosts["generate1"], GENERATES, generators=2)
            for name in ("learn1", "learn2"):
                nodes.join(hosts[name], LEARNS, ranks=1)
            nodes.wait()
            run = nodes.submit(
                hosts["outside"], configuration(made / "model", made / "data/train.jsonl", Path(scratch) / "runs")
            )
            run.wait("the first step", run.rows, SLOW)
            for part in options.parts:
                found[part] = {
                    "machine": machine(),
                    "hosts": network.kind,
                    "weights.relay": "node",
                    "learner.zero_stage": 2,
                    "phases": [],
                }
                story = Story(run, options.steps, found[part]["phases"], lambda: write_result(options.out, found))
                PARTS[part](story, nodes, hosts)
            print(nodes.pods(hosts["head"], "stop", str(run.folder.path)))
        except Exception:
            for name in nodes.processes:
                print(f"{name}:\n{(nodes.folder / f'{name}.log').read_text()[-500:]}")
            raise
        finally:
            nodes.end()


if __name__ == "__main__":
    main()
