"""The learner's update on one GPU, by how it computes: seconds, tokens, share of the card's speed, where the time goes.

    python -m benchmarks.update_speed --shape 0.5b                    # all ways, prompts of 128 tokens
    python -m benchmarks.update_speed --shape 3b --arms liger-packed --full liger-packed
    python -m benchmarks.update_speed --shape 0.5b --prompt 4096 --groups 4 --arms liger-packed liger-padded

A model with random weights in Qwen2.5's shapes trains the m = 16 kept of n = 64 rollouts of each group, in one process,
with the real trainer and DeepSpeed. Completions have log-normal lengths around 250 tokens, at most 512. `--full` trains
all 64 as well. `reference` is the way that the others are compared with: padded, the model's own code, the loss apart from the
output layer.

`of_peak` counts the matrix products that the computed tokens need (6 operations for each weight of the decoder and each
token, and of the output layer and each predicted token; not those of attention) over the speed of a large bfloat16
matrix product on the same card. `profile` sorts a profiled update's kernel time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._groups import make_groups
from benchmarks._machine import machine
from benchmarks._model_shapes import SHAPES
from benchmarks._result_file import write_result
from pods_cluster.config import build_config
from pods_cluster.learning import process_group
from pods_cluster.learning.step_plan import StepPlan, plan_settings, plan_step
from pods_cluster.learning.trainer import Trainer

LONGEST = 512
_MARK = "RESULT "
ARMS: dict[str, dict[str, Any]] = {
    "reference": {"kernels": "plain", "packing": "off"},
    "packed": {"kernels": "plain", "packing": "on"},
    "compile-packed": {"kernels": "compile", "packing": "on"},
    "liger-padded": {"kernels": "liger", "packing": "off"},
    "liger-packed": {"kernels": "liger", "packing": "on"},
}
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "_merge"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "output layer, elementwise": ("_row_statistics", "_gradient_of_logits"),
    "norm, rope, activation (Liger)": ("_rms_norm", "_swiglu", "_triton_rope", "rope"),
    "compiled layers": ("triton_poi", "triton_red", "triton_per"),
    "optimiser": ("multi_tensor", "adam"),
    "copies": ("Memcpy", "Memset", "copy_kernel", "direct_copy"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw_fused")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--profile", nargs="*", default=[], help="arms whose update is profiled")
    parser.add_argument("--full", nargs="*", default=[], help="arms that train all 64 as well")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--model", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is not None:  # a process of its own for each way: kernels are exchanged in place
        print(_MARK + json.dumps(_measure(options.model, options.arms[0], options.budgets[0], options)))
        return
    report: dict[str, Any] = {"benchmark": "update_speed", "machine": machine(), **_plain(options), "arms": []}
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), options.shape)
        report["product_tflops"] = _product_speed()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for arm in options.arms:
            for budget in options.budgets:
                found = {"arm": arm, "budget": budget, **_child(Path(folder), arm, budget, options)}
                for part in (found, found.get("full", {})):
                    if "operations" in part:
                        needed = part.pop("operations") / (report["product_tflops"] * 1e12)
                        part["of_peak"] = round(needed / part["passes_seconds"], 4)
                report["arms"].append(found)
                print(json.dumps({k: v for k, v in found.items() if k != "profile"}), flush=True)
                if options.out is not None:
                    write_result(options.out, report)


def _child(folder: Path, arm: str, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    """`_measure` in a process of its own; its error, if it has none to give."""
    command = [sys.executable, "-m", "benchmarks.update_speed", "--model", str(folder), "--shape", options.shape]
    command += ["--arms", arm, "--budgets", str(budget), "--prompt", str(options.prompt)]
    command += ["--groups", str(options.groups), "--repeats", str(options.repeats), "--zero", str(options.zero)]
    command += ["--optimizer", options.optimizer, "--profile", *options.profile, "--full", *options.full]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    return {"error": (done.stderr or done.stdout).strip()[-1500:]}


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("shape", "prompt", "groups", "repeats", "optimizer", "zero")}


def _save_model(folder: Path, shape: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **SHAPES[shape],
                tie_word_embeddings=True,
                max_position_embeddings=32768,
            )
        )
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def _product_speed() -> float:
    """TFLOP/s of a large bfloat16 matrix product of random numbers."""
    if not torch.cuda.is_available():
        return math.nan
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(13):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return round(2 * 8192**3 / statistics.median(times[3:]) / 1e9, 1)


def _measure(folder: Path, arm: str, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    store = process_group.open_store("127.0.0.1", 1, 60)
    process_group.join(0, 1, "127.0.0.1", store.port, store=store, timeout=60, collective_timeout=600)
    learner = ARMS[arm] | {
        "prompts_per_step": options.groups,
        "tokens_per_microbatch": max(budget, options.prompt + LONGEST),
        "zero_stage": options.zero,
        "optimizer": options.optimizer if gpu else "adamw",
    }
    config = build_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16" if gpu else "float32"},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": options.prompt},
            "reward": [{"name": "math_answer"}],
            "generator": {"engine": "vllm", "rollouts_per_prompt": 64, "max_tokens": LONGEST},
            "selector": {"keep": 16},
            "learner": learner,
            "run": {"name": "benchmark", "steps": 1000},
        }
    )
    began = time.monotonic()
    trainer = Trainer(config, 0, 1)
    start_seconds = time.monotonic() - began
    everyone, kept, rollouts = make_groups(
        options.groups,
        np.random.default_rng(0),
        vocabulary=SHAPES[options.shape]["vocab_size"],
        prompt_tokens=options.prompt,
        longest=LONGEST,
        lognormal=True,
    )
    plan = plan_step(kept, plan_settings(config, packed=trainer.packed))
    found = {"start_seconds": round(start_seconds, 1), "choices": trainer.choices}
    found |= _update(trainer, plan, rollouts, options.repeats)
    if arm in options.full:
        whole = plan_step(everyone, plan_settings(config, packed=trainer.packed))
        found["full"] = _update(trainer, whole, rollouts, options.repeats, step_seconds=found["optimiser_step_seconds"])
        found["share_of_full"] = round(found["seconds"] / found["full"]["seconds"], 4)
    if arm in options.profile:
        found["profile"] = _profile(trainer, plan, rollouts)
    process_group.leave()
    return found


def _update(
    trainer: Trainer, plan: StepPlan, rollouts: Any, repeats: int, step_seconds: float | None = None
) -> dict[str, Any]:
    """Updates by one plan, the first of which warms up; `step_seconds` of the optimiser are measured if not given."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    results = [trainer.train(plan.ranks[0], rollouts, 1e-6) for _ in range(repeats + 1)]
    seconds, result = [each.seconds for each in results], results[-1]
    median = statistics.median(seconds[1:])
    step = _step_seconds(trainer, plan, rollouts, repeats) if step_seconds is None else step_seconds
    return {
        "seconds": round(median, 4),
        "all_seconds": [round(value, 4) for value in seconds],
        "optimiser_step_seconds": round(step, 4),
        "passes_seconds": round(median - step, 4),
        "sequence_tokens": result.sequence_tokens,
        "computed_tokens": result.computed_tokens,
        "predicted_tokens": plan.trained_tokens,
        "microbatches": result.microbatches,
        "largest_microbatch": result.largest_microbatch,
        "operations": _operations(trainer, plan, result.computed_tokens),
        "peak_gb": round(trainer.peak_bytes() / 1e9, 1),
        "grad_norms": [each.grad_norms[0] for each in results],
        "loss": result.stats.sums["loss"],
        "entropy": result.stats.sums["entropy"] / result.stats.sums["tokens"],
    }


def _step_seconds(trainer: Trainer, plan: StepPlan, rollouts: Any, repeats: int) -> float:
    """Seconds of the optimiser's step alone, with the GPU idle before it."""
    step, taken = trainer.engine.step, []

    def timed(learning_rate: float) -> float:
        _synchronize()
        began = time.monotonic()
        norm = step(learning_rate)
        _synchronize()
        taken.append(time.monotonic() - began)
        return norm

    trainer.engine.step = timed
    for _ in range(repeats):
        trainer.train(plan.ranks[0], rollouts, 1e-6)
    trainer.engine.step = step
    return statistics.median(taken)


def _operations(trainer: Trainer, plan: StepPlan, computed: int) -> float:
    """Floating-point operations of the matrix products that an update needs."""
    model: Any = trainer.engine.policy.model
    layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    return 6.0 * layers * computed + 6.0 * model.lm_head.weight.numel() * plan.trained_tokens


def _profile(trainer: Trainer, plan: StepPlan, rollouts: Any) -> dict[str, Any]:
    """Milliseconds of kernels by kind, of the whole, and when no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        _synchronize()
        began = time.monotonic()
        trainer.train(plan.ranks[0], rollouts, 1e-6)
        _synchronize()
        wall = time.monotonic() - began
    by_kind: dict[str, float] = {}
    rows = []
    for event in record.key_averages():
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total:
            name = event.key
            kind = next((k for k, marks in KINDS.items() if any(m in name for m in marks)), "elementwise and sums")
            by_kind[kind] = by_kind.get(kind, 0.0) + event.self_device_time_total / 1e3
            rows.append([round(event.self_device_time_total / 1e3, 2), event.count, name[:110]])
    busy = sum(by_kind.values())
    return {
        "wall_ms": round(wall * 1e3, 1),
        "kernels_ms": {kind: round(ms, 1) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
        "busy_ms": round(busy, 1),
        "largest_kernels": sorted(rows, reverse=True)[:24],
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
