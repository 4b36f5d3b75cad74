"""Bytes that reach the learner's node of a two-node Ray cluster: those of the m kept rollouts, and not of the n made.

    sudo python -m benchmarks.two_nodes            (Linux, root: it makes a network namespace and removes it again)

A Ray node for the generators runs on the host, one for the learner in a network namespace of its own; all that they
exchange passes a pair of virtual Ethernet devices, whose counters are read at the end of each step. The runs are
`pods train` itself: the paced engine makes rollouts of realistic length without computing them, a real DeepSpeed rank
trains on those kept. m varies, all else is the same. `background` is what the two nodes exchange in a second without a
run; it is not subtracted. Writes `benchmarks/results/two_nodes.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import write_result

NAMESPACE = "pods-two-nodes"
HOST_SIDE, FAR_SIDE = "podsb0", "podsb1"
HOST, FAR, PORT = "10.251.77.1", "10.251.77.2", 6399
CURRENT = Path("/tmp/ray/ray_current_cluster")
RESULTS = Path(__file__).parent / "results" / "two_nodes.json"
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_ADDRESS": f"{HOST}:{PORT}",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
NODE = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_ADDRESS"}


def coin(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:  # noqa: ARG001
    """The run's reward: half of the made-up completions begin with a digit below 5."""
    return [float(text.strip()[:1] in "01234") if text.strip() else 0.0 for text in completions]


def sh(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    ray = str(Path(sys.executable).parent / "ray")
    inside = ("ip", "netns", "exec", NAMESPACE)
    common = ("--num-cpus=4", "--object-store-memory=500000000", "--disable-usage-stats", "--block")
    nodes: list[subprocess.Popen[bytes]] = []

    def node(*command: str) -> None:
        nodes.append(
            subprocess.Popen(
                command, env=NODE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        )

    try:
        sh("ip", "netns", "add", NAMESPACE)
        sh("ip", "link", "add", HOST_SIDE, "type", "veth", "peer", "name", FAR_SIDE)
        sh("ip", "link", "set", FAR_SIDE, "netns", NAMESPACE)
        sh("ip", "addr", "add", f"{HOST}/30", "dev", HOST_SIDE)
        sh("ip", "link", "set", HOST_SIDE, "up")
        sh(*inside, "ip", "addr", "add", f"{FAR}/30", "dev", FAR_SIDE)
        sh(*inside, "ip", "link", "set", FAR_SIDE, "up")
        sh(*inside, "ip", "link", "set", "lo", "up")
        head = ("--head", f"--node-ip-address={HOST}", f"--port={PORT}", "--include-dashboard=false")
        node(ray, "start", *head, '--resources={"pods_generator": 8}', *common)
        wait_for_nodes(1)
        far = (f"--address={HOST}:{PORT}", f"--node-ip-address={FAR}")
        node(*inside, ray, "start", *far, '--resources={"pods_learner": 8}', *common)
        wait_for_nodes(2)
        yield
    finally:
        # Each node by its own process group: `ray stop` would end every Ray cluster on the machine.
        for process in reversed(nodes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # or a later `ray.init()` on this machine would look for a cluster here
            if CURRENT.read_text().strip() == f"{HOST}:{PORT}":
                CURRENT.unlink()
        sh("ip", "netns", "del", NAMESPACE, check=False)
        sh("ip", "link", "del", HOST_SIDE, check=False)


def wait_for_nodes(count: int) -> None:
    code = "import ray; ray.init(logging_level='error'); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
    end = time.monotonic() + 90
    while f"nodes {count}" not in sh(sys.executable, "-c", code, check=False):
        if time.monotonic() > end:
            raise SystemExit(f"{count} Ray node(s) did not come up within 90 s")
        time.sleep(1)


def arrived() -> int:
    """Bytes that the learner's node has received."""
    return int(Path(f"/sys/class/net/{HOST_SIDE}/statistics/tx_bytes").read_text())


def prepare(folder: Path, context: int) -> Path:
    """A model that trains long sequences in no time, and prompts; bytes do not depend on what is in either."""
    from pods_cluster.quickstart.character_tokenizer import build_tokenizer
    from pods_cluster.quickstart.tiny_model import ModelSize, build_model

    tokenizer = build_tokenizer()
    build_model(ModelSize(hidden=64, layers=1, heads=1, mlp=64, context=context), tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def measure(folder: Path, arguments: argparse.Namespace, m: int) -> dict[str, Any]:
    """One run. Bytes between the ends of its second and its last step: the first one has the start-up in it."""
    n, tokens = arguments.n, arguments.tokens
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"path": str(folder / "rows.jsonl"), "prompt": "prompt", "answer": "answer", "max_prompt_tokens": 16},
        "reward": [{"name": f"{Path(__file__).resolve()}:coin"}],
        "generator": {
            "engine": "paced",
            "rollouts_per_prompt": n,
            "max_tokens": tokens,
            "max_sequences": 4096,
            "engine_options": {"tokens_per_second": 400_000.0, "shortest": tokens // 2, "longest": tokens},
        },
        "selector": {"keep": m, "no_signal": "keep"},
        "learner": {"zero_stage": 1, "prompts_per_step": arguments.prompts, "tokens_per_microbatch": 4 * tokens},
        "run": {"name": f"two-nodes-{m}", "dir": str(folder / "runs"), "steps": arguments.steps, "samples_every": 0,
                "export": False, "checkpoint": {"every": 0}},
        "cluster": {"address": f"{HOST}:{PORT}"},
    }  # fmt: skip
    path = folder / f"run{m}.yaml"
    path.write_text(json.dumps(config))
    metrics = folder / "runs" / f"two-nodes-{m}" / "metrics.jsonl"
    command = [sys.executable, "-m", "pods_cluster.client.cli", "train", "--plain", str(path)]
    at: dict[int, tuple[float, int]] = {}
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while run.poll() is None:
            now = arrived()
            for row in map(json.loads, metrics.read_text().splitlines() if metrics.exists() else []):
                at.setdefault(row["step"], (time.monotonic(), now))
            time.sleep(0.01)
        if run.returncode:
            raise SystemExit(run.stdout.read() if run.stdout else "the run failed")
    rows = {row["step"]: row for row in map(json.loads, metrics.read_text().splitlines())}
    first, last = 2, arguments.steps
    steps = [rows[step] for step in range(first + 1, last + 1)]
    trained = sum(row["rollouts/trained"] for row in steps)
    return {
        "m": m,
        "steps": len(steps),
        "seconds": at[last][0] - at[first][0],
        "bytes_arrived": at[last][1] - at[first][1],
        "rollout_bytes": sum(row["learner/received_bytes"] for row in steps),
        "rollouts_trained": trained,
        "rollouts_generated": sum(row["rollouts/generated"] for row in steps),
        "trained_tokens": sum(row["tokens/trained"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--m", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--prompts", type=int, default=8, help="groups a step")
    parser.add_argument("--tokens", type=int, default=4096, help="longest completion; the shortest has half as many")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("two network namespaces need root: run it with sudo")
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": {k: v for k, v in vars(arguments).items() if k != "out"},
    }
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as scratch, two_nodes():
        folder = prepare(Path(scratch), arguments.tokens + 64)
        time.sleep(5)
        before = arrived()
        time.sleep(10)
        result["background_bytes_per_second"] = (arrived() - before) / 10
        result["runs"] = []
        for m in arguments.m:
            row = measure(folder, arguments, m)
            row["arrived_per_trained_byte"] = row["bytes_arrived"] / row["rollout_bytes"]
            result["runs"].append(row)
            print(json.dumps(row), flush=True)
            write_result(arguments.out, result)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
