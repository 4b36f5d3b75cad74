"""Tokens per second of one generator card, arm by arm: what host work can be spared, how near the bound it is.

    python -m benchmarks.engine --shape 0.5b --in-flight 1024 --max-tokens 256 --arms llm,core,core-logprobs,four
    python -m benchmarks.engine --list

Each arm runs in processes of its own with a time limit, and its result is appended to `--out` (JSON lines) as soon as
it is there, so a run that is cut off keeps what it had. Without `--model` the weights are random, of Qwen2.5's
shapes: speed does not depend on their values. After a warm-up each arm runs `--repeats` rounds for each of `--group-
sizes` (so many sequences share a prompt); a round's figure is all generated tokens over the wall time from the first
request to the last token, an arm's the median of its rounds. `--profile` adds where a step's time goes. `bound` is
what reading the weights once a step and each sequence's keys and values would allow at the card's measured copy
bandwidth; with many sequences of a larger model `compute_bound`, the matrix products alone, is the lower one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._model_shapes import SHAPES
from benchmarks.engine_arms import ARMS, QWEN, Arm


def main() -> None:
    arguments = parse()
    if arguments.list:
        for name, arm in ARMS.items():
            print(f"{name:20} {arm.about}")
        return
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        model = arguments.model or write_config(arguments.shape, Path(scratch) / "model")
        with multi_process_service() if arguments.mps else nullcontext():
            run_arms(arguments, model, out, Path(scratch))


def run_arms(arguments: argparse.Namespace, model: str, out: Path, scratch: Path) -> None:
    facts = bandwidth(arguments, model)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("list", "out")}
    append(out, {"machine": machine(), **facts, "settings": settings})
    for name in arguments.arms.split(","):
        for result in run_arm(name, arguments, model, scratch, facts):
            append(out, {"arm": name, "engines": ARMS[name].engines, **result})
            shown = {key: value for key, value in result.items() if key not in ("parts", "profile")}
            print(name, json.dumps(shown), flush=True)


@contextmanager
def multi_process_service() -> Iterator[None]:
    """NVIDIA's MPS daemon for this run alone: the processes of a card compute at the same time, not in turns."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = ["nvidia-cuda-mps-control"]
        # The daemon numbers all cards, as its clients' CUDA_VISIBLE_DEVICES counts them.
        everywhere = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        subprocess.run([*control, "-d"], check=True, timeout=30, env=everywhere)
        try:
            yield
        finally:
            subprocess.run(control, input="quit -t 5\n", text=True, timeout=60, check=False)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a model with weights; left out: random ones of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--in-flight", type=int, default=1024, help="sequences on the card, over all its engines")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--group-sizes", default="1", help="sequences that share a prompt, e.g. 1,64")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds of each group size")
    parser.add_argument("--profile", action="store_true", help="parts of a step, for engines in their own process")
    parser.add_argument("--arms", default="llm,llm-logprobs,core,core-logprobs,core-rescore,process,two,four")
    parser.add_argument("--arm-seconds", type=float, default=300.0, help="time limit of one arm, start included")
    parser.add_argument("--memory-share", type=float, default=0.85, help="of the card, over all engines of an arm")
    parser.add_argument("--reserve-gb", type=float, default=4.0, help="for activations and graphs, each engine")
    parser.add_argument("--mps", action="store_true", help="with NVIDIA's multi-process service on the card")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="engine option for every arm")
    parser.add_argument("--out", default="benchmarks/results/engine.jsonl")
    parser.add_argument("--list", action="store_true", help="name the arms")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.arms.split(",") if name not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)}: unknown; --list names them")
    for pair in arguments.set:
        if "=" not in pair:
            parser.error(f"--set: {pair!r} must be NAME=VALUE")
    try:
        arguments.group_sizes = [int(size) for size in arguments.group_sizes.split(",")]
    except ValueError:
        parser.error(f"--group-sizes: {arguments.group_sizes!r} must be numbers with commas between them")
    for size in arguments.group_sizes:
        if size < 1 or any(arguments.in_flight // ARMS[name].engines % size for name in arguments.arms.split(",")):
            parser.error(f"--group-sizes: {size}: an engine's part of --in-flight must be a multiple of it")
    if arguments.repeats < 1:
        parser.error(f"--repeats: {arguments.repeats} must be at least 1")
    return arguments


def write_config(shape: str, folder: Path) -> str:
    folder.mkdir(parents=True)
    config = QWEN | SHAPES[shape]
    if config["vocab_size"] < QWEN["eos_token_id"]:
        config |= {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)


def append(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


# The parent's side of an arm.


def bandwidth(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """The card's memory (bytes), copy bandwidth (bytes/s) and matrix speed (FLOP/s), and the bounds that follow: `bound`
    reads the weights once a step and each sequence's keys and values, `compute_bound` multiplies by every weight once a
    token. Measured in a process of its own."""
    code = (
        "import json, time, torch\n"
        "gpu = torch.cuda.is_available()\n"
        "n = 2**31 if gpu else 2**26\n"
        "a = torch.zeros(n, dtype=torch.uint8, device='cuda' if gpu else 'cpu'); b = torch.empty_like(a)\n"
        "wait = torch.cuda.synchronize if gpu else (lambda: None)\n"
        "[b.copy_(a) for _ in range(3)]; wait(); t = time.perf_counter()\n"
        "[b.copy_(a) for _ in range(10)]; wait(); t = time.perf_counter() - t\n"
        "m = 8192 if gpu else 512\n"
        "kind = torch.bfloat16 if gpu else torch.float32\n"
        "x = torch.randn(m, m, device=a.device, dtype=kind); y = torch.randn(m, m, device=a.device, dtype=kind)\n"
        "[x @ y for _ in range(3)]; wait(); u = time.perf_counter()\n"
        "[x @ y for _ in range(10)]; wait(); u = time.perf_counter() - u\n"
        "memory = torch.cuda.get_device_properties(0).total_memory if gpu else 0\n"
        "name = torch.cuda.get_device_name(0) if gpu else 'cpu'\n"
        "print(json.dumps({'device': name, 'memory': memory, 'bandwidth': 20 * n / t, 'flops': 20 * m**3 / u}))\n"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    facts: dict[str, Any] = json.loads(text.splitlines()[-1])
    config = json.loads((Path(model) / "config.json").read_text())
    width = 4 if arguments.dtype == "float32" else 2
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head
    layer = hidden * (heads * head) * 2 + hidden * kv * 2 + 3 * hidden * config["intermediate_size"]
    facts["weight_bytes"] = width * (layers * layer + hidden * config["vocab_size"])
    facts["kv_token_bytes"] = 2 * width * layers * kv
    length = arguments.prompt_tokens + arguments.max_tokens / 2
    step = facts["weight_bytes"] + arguments.in_flight * length * facts["kv_token_bytes"]
    facts["bound"] = round(arguments.in_flight * facts["bandwidth"] / step)
    facts["compute_bound"] = round(facts["flops"] / (2 * facts["weight_bytes"] / width))
    return facts


def run_arm(
    name: str, arguments: argparse.Namespace, model: str, scratch: Path, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row for each group size, or one with the `error`."""
    arm = ARMS[name]
    folder = scratch / name
    folder.mkdir()
    share, started = arguments.in_flight // arm.engines, time.monotonic()
    children = []
    for number in range(arm.engines):
        plan = {
            "arm": asdict(arm),
            "number": number,
            "folder": str(folder),
            "model": model,
            "random": arguments.model is None,
            "dtype": arguments.dtype,
            "sequences": share,
            "max_tokens": arguments.max_tokens,
            "prompt_tokens": arguments.prompt_tokens,
            "group_sizes": arguments.group_sizes,
            "repeats": arguments.repeats,
            "profile": arguments.profile,
            "memory": memory_options(arm, arguments, facts),
            "set": arguments.set,
        }
        path = folder / f"plan{number}.json"
        path.write_text(json.dumps(plan))
        log = (folder / f"log{number}.txt").open("w")
        command = [sys.executable, "-m", "benchmarks.engine_child", str(path)]
        children.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    try:
        rounds = len(arguments.group_sizes) * arguments.repeats
        error = conduct(folder, children, rounds, started + arguments.arm_seconds)
    finally:
        stop(children)
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
    if error is None:
        error = next((part["error"] for part in parts if "error" in part), None)
    if error is not None or len(parts) < arm.engines:
        log = (folder / "log0.txt").read_text()[-1500:]
        return [{"error": error or "an engine ended without a result", "log": log, "parts": parts}]
    rows = [summary(arm, parts, size, facts) for size in arguments.group_sizes]
    if parts[0]["profile"]:
        rows[0]["profile"] = parts[0]["profile"]
    return rows


def summary(arm: Arm, parts: list[dict[str, Any]], group_size: int, facts: dict[str, Any]) -> dict[str, Any]:
    """`rates`: tokens/s of each round, over all engines from the first one's begin to the last one's end."""
    rates, step_ms, digests = [], [], []
    for engines in zip(*(part["rounds"] for part in parts), strict=True):
        if engines[0]["group_size"] == group_size:
            begin, end = min(one["begin"] for one in engines), max(one["end"] for one in engines)
            rates.append(round(sum(one["tokens"] for one in engines) / (end - begin)))
            step_ms.append(max(one["step_ms"] for one in engines))
            digests.append([one["digest"] for one in engines])
    rate = round(statistics.median(rates))
    engine = {key: value for key, value in parts[0].items() if key not in ("rounds", "profile", "start_seconds")}
    return {
        "about": arm.about,
        "group_size": group_size,
        "tokens_per_second": rate,
        "rates": rates,
        "digests": digests,
        "share_of_bound": round(rate / facts["bound"], 3),
        "share_of_compute_bound": round(rate / facts["compute_bound"], 3),
        "step_ms": round(statistics.median(step_ms), 2),
        "start_seconds": round(max(part["start_seconds"] for part in parts), 1),
        **engine,
    }


def memory_options(arm: Arm, arguments: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Explicit sizes for engines that start at the same time: each would measure the others' memory as its own."""
    if not facts["memory"]:
        return {}
    share = arguments.memory_share / arm.engines
    if arm.engines == 1:
        return {"gpu_memory_utilization": share}
    cache = share * facts["memory"] / 2**30 - facts["weight_bytes"] / 2**30 - arguments.reserve_gb
    if cache <= 0.5:
        raise SystemExit(f"{arm.engines} engines do not fit the card: lower --reserve-gb or --in-flight")
    wanted = arguments.in_flight / arm.engines * (arguments.prompt_tokens + arguments.max_tokens + 32)
    wanted *= facts["kv_token_bytes"] / 2**30
    return {"gpu_memory_utilization": round(share, 3), "kv_cache_gb": round(min(cache, 1.2 * wanted + 0.5), 2)}


def conduct(folder: Path, children: list[subprocess.Popen[bytes]], rounds: int, end: float) -> str | None:
    """Let all begin each round at once when all are ready; wait for all. The reason if that does not come about."""
    for turn in range(rounds):
        while len(list(folder.glob(f"ready{turn}.*"))) < len(children):
            if any(child.poll() is not None for child in children):
                time.sleep(1)
                return "an engine ended before it was ready" if not list(folder.glob("result*")) else None
            if time.monotonic() > end:
                return f"round {turn + 1} not reached within --arm-seconds"
            time.sleep(0.02)
        (folder / f"go{turn}").touch()
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "not done within --arm-seconds"
    return None


def stop(children: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with the processes that it started."""
    import signal

    for child in children:
        with suppress(ProcessLookupError):  # a child that has ended may leave its engine's own process on the card
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    main()
