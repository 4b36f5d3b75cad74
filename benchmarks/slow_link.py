"""What a slow link between generators and learner costs a step: two Ray nodes, a cap on the bandwidth between them.

    sudo python -m benchmarks.slow_link            (Linux, root: network namespaces; the kernel's `tbf` queue)

The nodes are those of `benchmarks/two_nodes.py`: generators on the host, the learner in a network namespace. A token bucket
on both ends of the link between them caps what goes to the learner (the kept rollouts) and what comes from it (the new
weights, 4.2 MB in float32, over gloo to two generators, without and with `weights.relay: node`). Paced engines, a real
DeepSpeed rank, staleness 1. Latency is in `benchmarks/cluster.py`. Writes
`benchmarks/results/slow_link.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.two_nodes import ENVIRONMENT, FAR_SIDE, HOST, HOST_SIDE, NAMESPACE, PORT, coin, sh, two_nodes

RESULT = Path(__file__).parent / "results" / "slow_link.json"
STAGES = ("step", "wait", "fetch", "update", "publish")
SKIP = 2
"""First steps that are left out: start-up, and the group of the broadcast is made."""
REWARD = f"{Path(__file__).resolve().with_name('two_nodes.py')}:{coin.__name__}"


def cap(megabits: float) -> None:
    """Cap the link in both directions; 0: no cap."""
    for prefix, device in (((), HOST_SIDE), (("ip", "netns", "exec", NAMESPACE), FAR_SIDE)):
        sh(*prefix, "tc", "qdisc", "del", "dev", device, "root", check=False)
        if megabits:
            sh(*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{megabits:g}mbit",
               "burst", "64kb", "latency", "200ms")  # fmt: skip


def prepare(folder: Path) -> None:
    """The quickstart's model, untrained, and prompts."""
    from pods_cluster.quickstart.character_tokenizer import build_tokenizer
    from pods_cluster.quickstart.tiny_model import ModelSize, build_model

    tokenizer = build_tokenizer()
    build_model(ModelSize(context=320), tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, steps: int, megabits: float, relay: str) -> dict[str, Any]:
    """One run; medians of its steps' times."""
    cap(megabits)
    name = f"link-{megabits:g}-{relay}"
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"path": str(folder / "rows.jsonl"), "prompt": "prompt", "answer": "answer", "max_prompt_tokens": 16},
        "reward": [{"name": REWARD}],
        "generator": {"engine": "paced", "workers": 2, "rollouts_per_prompt": 16, "max_tokens": 256,
                      "engine_options": {"tokens_per_second": 8000.0, "shortest": 64, "longest": 256}},
        "selector": {"keep": 4, "no_signal": "keep"},
        "learner": {"zero_stage": 1, "prompts_per_step": 8, "tokens_per_microbatch": 2048},
        "weights": {"relay": relay},
        "staleness": 1,
        "run": {"name": name, "dir": str(folder / "runs"), "steps": steps, "samples_every": 0, "export": False,
                "checkpoint": {"every": 0, "minutes": 0}},
        "cluster": {"address": f"{HOST}:{PORT}"},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "pods_cluster.client.cli", "train", "--plain", str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > SKIP]
    row: dict[str, Any] = {"megabits": megabits or None, "relay": relay, "steps": len(rows)}
    for stage in STAGES:
        row[stage] = statistics.median(item.get(f"timing_s/{stage}", 0.0) for item in rows)
    row["weights_bytes"] = rows[-1]["weights/bytes"]
    row["rollout_bytes"] = statistics.median(item["learner/received_bytes"] for item in rows)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabits", type=float, nargs="+", default=[0, 100, 20], help="0: no cap")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run it with sudo")
    result: dict[str, Any] = {"machine": machine(), "staleness": 1, "generators": 2, "rows": []}
    with tempfile.TemporaryDirectory(prefix="slow-link-") as scratch, two_nodes():
        prepare(Path(scratch))
        arms = [(megabits, "auto") for megabits in options.megabits]
        for megabits, relay in [*arms, (min(item for item in options.megabits if item), "node")]:
            result["rows"].append(measure(Path(scratch), options.steps, megabits, relay))
            print(json.dumps(result["rows"][-1]), flush=True)
            write_result(options.out, result)


if __name__ == "__main__":
    main()
