"""Tokens per second of one generator card, arm by arm: what host work can be spared, how near the bound it is.

    python benchmarks/engine.py --shape 0.5b --in-flight 1024 --max-tokens 256 --arms llm,core,core-logprobs,four
    python benchmarks/engine.py --list

Each arm runs in processes of its own with a time limit, and its result is appended to `--out` (JSON lines) as soon as
it is there, so a run that is cut off keeps what it had. Without `--model` the weights are random, of Qwen2.5's shapes:
speed does not depend on their values. An arm's figure is all generated tokens over the wall time from the first request
to the last token, in its second round (the first warms up). `bound` is what reading the weights once a step and each
sequence's keys and values would allow at the card's measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from _machine import machine

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


@dataclass(frozen=True)
class Arm:
    """`engines` share the card, each with its part of the sequences. `prompts`: how many different ones (0: all)."""

    about: str
    engines: int = 1
    front_end: bool = False
    n: int = 1
    prompts: int = 0
    logprobs: bool = False
    rescore: float = 0.0
    collect: bool = True
    options: dict[str, Any] = field(default_factory=dict)


ARMS: dict[str, Arm] = {
    "llm": Arm("vLLM's LLM class, each sequence a request", front_end=True),
    "llm-logprobs": Arm("the same with logprobs=0", front_end=True, logprobs=True),
    "llm-64": Arm("vLLM's LLM class, n = 64 a prompt", front_end=True, n=64),
    "llm-64-logprobs": Arm("the same with logprobs=0", front_end=True, n=64, logprobs=True),
    "core": Arm("this engine: the core without vLLM's front end"),
    "core-logprobs": Arm("log-probabilities of every sampled token", logprobs=True),
    "core-rescore": Arm("log-probabilities of a quarter, by a second look", rescore=0.25),
    "core-64": Arm("64 sequences a prompt", prompts=-64),
    "core-64-logprobs": Arm("64 sequences a prompt, with log-probabilities", prompts=-64, logprobs=True),
    "core-unseeded": Arm("one random stream for the engine", options={"seeded": "engine"}),
    "core-sync": Arm("without asynchronous scheduling", options={"async_scheduling": False}),
    "core-graph512": Arm("graphs captured up to 512 sequences", options={"max_cudagraph_capture_size": 512}),
    "core-nostats": Arm("without the scheduler's statistics", options={"disable_log_stats": True}),
    "core-noprefix": Arm("without prefix caching", options={"enable_prefix_caching": False}),
    "core-nogc": Arm("without garbage collection", collect=False),
    "core-eager": Arm("without graphs", options={"enforce_eager": True}),
    "process": Arm("the core in a process of its own", options={"process": True}),
    "process-logprobs": Arm("the same with log-probabilities", logprobs=True, options={"process": True}),
}
for _count, _word in ((2, "two"), (3, "three"), (4, "four"), (6, "six"), (8, "eight")):
    ARMS[_word] = Arm(f"{_count} engines share the card", engines=_count)
    ARMS[f"{_word}-logprobs"] = Arm(f"{_count} engines, with log-probabilities", engines=_count, logprobs=True)
    ARMS[f"{_word}-64-logprobs"] = Arm(
        f"{_count} engines, 64 sequences a prompt, with log-probabilities", engines=_count, prompts=-64, logprobs=True
    )
    ARMS[f"{_word}-rescore"] = Arm(f"{_count} engines, a quarter scored again", engines=_count, rescore=0.25)
    ARMS[f"{_word}-process"] = Arm(f"{_count} engines, cores apart", engines=_count, options={"process": True})


def main() -> None:
    arguments = parse()
    if arguments.list:
        for name, arm in ARMS.items():
            print(f"{name:20} {arm.about}")
        return
    if arguments.child:
        child(json.loads(Path(arguments.child).read_text()))
        return
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        model = arguments.model or write_config(arguments.shape, Path(scratch) / "model")
        facts = bandwidth(arguments, model)
        shown = {name: value for name, value in vars(arguments).items() if name not in ("list", "child")}
        append(out, {"machine": machine(), **facts, "settings": shown})
        for name in arguments.arms.split(","):
            result = {
                "arm": name,
                "engines": ARMS[name].engines,
                **run_arm(name, arguments, model, Path(scratch), facts),
            }
            append(out, result)
            print(json.dumps({key: value for key, value in result.items() if key != "parts"}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a model with weights; left out: random ones of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--in-flight", type=int, default=1024, help="sequences on the card, over all its engines")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--arms", default="llm,llm-logprobs,core,core-logprobs,core-rescore,process,two,four")
    parser.add_argument("--arm-seconds", type=float, default=300.0, help="time limit of one arm, start included")
    parser.add_argument("--memory-share", type=float, default=0.85, help="of the card, over all engines of an arm")
    parser.add_argument("--reserve-gb", type=float, default=4.0, help="for activations and graphs, each engine")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="engine option for every arm")
    parser.add_argument("--out", default="benchmarks/results/engine.jsonl")
    parser.add_argument("--list", action="store_true", help="name the arms")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.arms.split(",") if name not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)}: unknown; --list names them")
    for pair in arguments.set:
        if "=" not in pair:
            parser.error(f"--set: {pair!r} must be NAME=VALUE")
    return arguments


def write_config(shape: str, folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_QWEN | SHAPES[shape], indent=2))
    return str(folder)


def append(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


# The parent's side of an arm.


def bandwidth(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """The card's memory (bytes) and copy bandwidth (bytes/s), and the bound that follows; in a process of its own."""
    code = (
        "import json, time, torch\n"
        "gpu = torch.cuda.is_available()\n"
        "n = 2**31 if gpu else 2**26\n"
        "a = torch.zeros(n, dtype=torch.uint8, device='cuda' if gpu else 'cpu'); b = torch.empty_like(a)\n"
        "wait = torch.cuda.synchronize if gpu else (lambda: None)\n"
        "[b.copy_(a) for _ in range(3)]; wait(); t = time.perf_counter()\n"
        "[b.copy_(a) for _ in range(10)]; wait(); t = time.perf_counter() - t\n"
        "memory = torch.cuda.get_device_properties(0).total_memory if gpu else 0\n"
        "name = torch.cuda.get_device_name(0) if gpu else 'cpu'\n"
        "print(json.dumps({'device': name, 'memory': memory, 'bandwidth': 20 * n / t}))\n"
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
    return facts


def run_arm(
    name: str, arguments: argparse.Namespace, model: str, scratch: Path, facts: dict[str, Any]
) -> dict[str, Any]:
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
            "memory": memory_options(arm, arguments, facts),
            "set": arguments.set,
        }
        path = folder / f"plan{number}.json"
        path.write_text(json.dumps(plan))
        log = (folder / f"log{number}.txt").open("w")
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(path)]
        children.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    try:
        error = conduct(folder, children, started + arguments.arm_seconds)
    finally:
        stop(children)
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
    if error is None:
        error = next((part["error"] for part in parts if "error" in part), None)
    if error is not None or len(parts) < arm.engines:
        log = (folder / "log0.txt").read_text()[-1500:]
        return {"error": error or "an engine ended without a result", "log": log, "parts": parts}
    begin, end = min(part["begin"] for part in parts), max(part["end"] for part in parts)
    tokens = sum(part["tokens"] for part in parts)
    return {
        "about": arm.about,
        "tokens_per_second": round(tokens / (end - begin)),
        "share_of_bound": round(tokens / (end - begin) / facts["bound"], 3),
        "seconds": round(end - begin, 3),
        "tokens": tokens,
        "start_seconds": round(max(part["start_seconds"] for part in parts), 1),
        "step_ms": round(max(part["step_ms"] for part in parts), 2),
        "runner": parts[0].get("runner"),
        "parts": parts,
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


def conduct(folder: Path, children: list[subprocess.Popen[bytes]], end: float) -> str | None:
    """Let all begin at once when all are ready; wait for all. The reason if that does not come about."""
    while len(list(folder.glob("ready*"))) < len(children):
        if any(child.poll() is not None for child in children):
            time.sleep(1)
            return "an engine ended before it was ready" if not list(folder.glob("result*")) else None
        if time.monotonic() > end:
            return "not ready within --arm-seconds"
        time.sleep(0.05)
    (folder / "go").touch()
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
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


# One engine's process.


def child(plan: dict[str, Any]) -> None:
    target = Path(plan["folder"]) / f"result{plan['number']}.json"
    try:
        result = measure(plan)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(result))
    partial.replace(target)
    sys.stdout.flush()
    os._exit(0)  # not held up by an engine that is slow to end


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    arm = Arm(**plan["arm"])
    started = time.perf_counter()
    bench = FrontEnd(plan, arm) if arm.front_end else Engine(plan, arm)
    start_seconds = time.perf_counter() - started
    bench.round(0, min(16, plan["max_tokens"]))
    (Path(plan["folder"]) / f"ready{plan['number']}").touch()
    while not (Path(plan["folder"]) / "go").exists():
        time.sleep(0.01)
    if not arm.collect:
        gc.collect()
        gc.freeze()
        gc.disable()
    begin = time.time()
    tokens, steps = bench.round(1, plan["max_tokens"])
    end = time.time()
    return {
        "begin": begin,
        "end": end,
        "tokens": tokens,
        "start_seconds": start_seconds,
        "step_ms": 1000 * (end - begin) / max(1, steps),
        **bench.facts(),
    }


def make_prompts(plan: dict[str, Any], arm: Arm, turn: int) -> list[tuple[int, ...]]:
    """A prompt a sequence; new ones each round, so that the prefix cache helps only within it."""
    rng = random.Random(1000 * turn + plan["number"])
    sequences = plan["sequences"]
    different = max(1, sequences // -arm.prompts) if arm.prompts < 0 else arm.prompts or sequences
    config = json.loads((Path(plan["model"]) / "config.json").read_text())
    pool = [
        tuple(rng.randrange(10, config["vocab_size"]) for _ in range(plan["prompt_tokens"])) for _ in range(different)
    ]
    return [pool[index * different // sequences] for index in range(sequences)]


def engine_options(plan: dict[str, Any], arm: Arm) -> dict[str, Any]:
    import yaml

    options: dict[str, Any] = dict(plan["memory"])
    if plan["random"]:
        options["load_format"] = "dummy"
    options |= arm.options
    for pair in plan["set"]:
        name, value = pair.split("=", 1)
        options[name] = yaml.safe_load(value)
    return options


class Engine:
    """The service's own engine."""

    def __init__(self, plan: dict[str, Any], arm: Arm) -> None:
        from pods_cluster.config import Config
        from pods_cluster.generation.vllm_engine import make_vllm_engine

        options = engine_options(plan, arm)
        if arm.rescore:
            options["logprobs"] = "rescore"
        config = Config.model_validate(
            {
                "model": {"path": plan["model"], "dtype": plan["dtype"]},
                "data": {"path": "none.jsonl", "max_prompt_tokens": plan["prompt_tokens"]},
                "reward": [{"name": "exact_match"}],
                "generator": {
                    "engine": "vllm",
                    "max_tokens": plan["max_tokens"],
                    "max_sequences": plan["sequences"],
                    "engine_options": options,
                },
                "run": {"name": "benchmark"},
            }
        )
        self._plan, self._arm = plan, arm
        self._engine = make_vllm_engine(config, None)
        self._engine.version = 0
        self._engine._end_ids = ()  # every sequence has the same length

    def round(self, turn: int, max_tokens: int) -> tuple[int, int]:
        from pods_cluster.types import GroupId, RolloutRequest, SamplingParams

        sampling = SamplingParams(
            max_tokens=max_tokens, seed=turn, logprobs=self._arm.logprobs or self._arm.rescore > 0
        )
        prompts = make_prompts(self._plan, self._arm, turn)
        self._engine.submit(
            [RolloutRequest(GroupId(turn, 0), index, prompt, sampling) for index, prompt in enumerate(prompts)]
        )
        rollouts, steps = [], 0
        while self._engine.in_flight:
            rollouts += self._engine.step()
            steps += 1
        if self._arm.rescore:
            self._engine.rescore(rollouts[: int(self._arm.rescore * len(rollouts))])
        return sum(len(rollout.token_ids) for rollout in rollouts), steps

    def facts(self) -> dict[str, Any]:
        core = self._engine._core
        stats = self._engine.stats()
        return {
            "runner": core.runner,
            "async_scheduling": core.async_scheduling,
            "cache_tokens": core.cache_tokens,
            "preemptions": stats.preemptions,
        }


class FrontEnd:
    """vLLM's `LLM` class as its users call it, with the same arguments otherwise."""

    def __init__(self, plan: dict[str, Any], arm: Arm) -> None:
        from pods_cluster.generation import vllm_compat

        vllm_compat.prepare_environment(process=False, threads=1)
        from vllm import LLM

        options = engine_options(plan, arm)
        length = plan["prompt_tokens"] + plan["max_tokens"] + 1
        if vllm_compat.on_gpu():
            options.setdefault("max_cudagraph_capture_size", plan["sequences"])
        else:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}
        self._plan, self._arm = plan, arm
        self._llm = LLM(
            model=plan["model"],
            dtype=plan["dtype"],
            skip_tokenizer_init=True,
            max_num_seqs=plan["sequences"],
            max_model_len=length,
            logprobs_mode="processed_logprobs",
            **options,
        )

    def round(self, turn: int, max_tokens: int) -> tuple[int, int]:
        from vllm import SamplingParams

        arm = self._arm if self._arm.n == 1 else replace(self._arm, prompts=-self._arm.n)
        prompts = make_prompts(self._plan, arm, turn)[:: self._arm.n]
        sampling = SamplingParams(
            n=self._arm.n,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if self._arm.logprobs else None,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        return sum(len(part.token_ids) for output in outputs for part in output.outputs), max_tokens

    def facts(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    main()
