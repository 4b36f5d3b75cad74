"""Whether a run that lost the node of its learner ranks ends with the weights of one that lost nothing, bit for bit.

    sudo python -m benchmarks.lost_node --model .cache/quickstart-…

Both runs are made on a Ray cluster of hosts of their own (see `cluster`), one after the other: staleness 0, one generator on a
node that stays, two ranks on one of two nodes that have room for them. In the second run that node is cut off in the middle of
things (a network namespace; a node that is a group of processes is killed), and the ranks start on the other one from the
newest light copy. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cluster import GENERATES, LEARNS, configuration
from benchmarks.node_network import NodeNetwork
from benchmarks.ray_nodes import RayNodes, SubmittedRun, hosts_of_this_system

LIMIT = 400.0
COMPARED = ("reward", "loss", "grad_norm", "tokens/trained")


def start(nodes: RayNodes, made: Path, name: str, options: argparse.Namespace) -> SubmittedRun:
    config = configuration(made / "model", made / "data/train.jsonl", nodes.folder / "runs", workers=1)
    config["learner"]["prompts_per_step"] = 4
    config["generator"]["rollouts_per_prompt"] = 8
    config["selector"]["no_signal"] = options.no_signal
    config["run"] |= {"name": name, "steps": options.steps, "export": True}
    config["run"]["checkpoint"]["copy_every"] = 2
    return nodes.submit(nodes.network.hosts["outside"], config)


def first_difference(one: SubmittedRun, other: SubmittedRun) -> int | None:
    """The first step whose numbers are not the same in both runs; of one that was made again, as it stands."""
    made = [{row["step"]: [row.get(name) for name in COMPARED] for row in run.rows()} for run in (one, other)]
    return next((step for step in sorted(made[0]) if made[0][step] != made[1].get(step)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder that the quickstart made (model, data)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-signal", choices=("keep", "drop", "replace"), default="keep")
    parser.add_argument("--processes", action="store_true", help="no network namespaces, also where they can be made")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    network = hosts_of_this_system(options.processes or None)
    with tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp", ignore_cleanup_errors=True) as scratch, network:
        nodes = RayNodes(network, Path(scratch))
        hosts = {name: network.add(name) for name in ("head", "generate", "learn1", "learn2", "outside")}
        try:
            nodes.start_head(hosts["head"])
            nodes.join(hosts["generate"], GENERATES, generators=1)
            for name in ("learn1", "learn2"):
                nodes.join(hosts[name], LEARNS, ranks=2)
            nodes.wait()
            made = options.model.resolve()
            whole = start(nodes, made, "whole", options)
            whole.wait("the end of the unbroken run", lambda: whole.events("finished"), LIMIT)
            lost = start(nodes, made, "lost", options)
            lost.wait_for_steps(options.steps // 2, LIMIT)
            (node,) = set(lost.places()["learner"])
            began, lost_in = time.monotonic(), len(lost.rows()) + 1
            if isinstance(network, NodeNetwork):
                network.cut(hosts[node])
            else:
                hosts[node].kill()
            lost.wait_for_steps(2, LIMIT)
            seconds = time.monotonic() - began
            lost.wait("the end of the run with the loss", lambda: lost.events("finished"), LIMIT)
            weights = [(run.folder.model / "model.safetensors").read_bytes() for run in (whole, lost)]
            print(json.dumps({
                "hosts": network.kind,
                "steps": options.steps,
                "seconds_to_two_steps": round(seconds, 1),
                "restarted": [event["text"] for event in lost.events("restarted")],
                "restarting": [event["text"] for event in lost.events("restarting")],
                "steps_made": len(lost.rows()),
                "lost_in_step": lost_in,
                "first_step_that_differs": first_difference(whole, lost),
                "same_weights": weights[0] == weights[1],
                "bytes": len(weights[0]),
            }))  # fmt: skip
        finally:
            nodes.end()


if __name__ == "__main__":
    main()
