"""The learner's update on the m = 16 kept of n = 64 rollouts against the update on all 64, in one process on a CPU.

    python -m benchmarks.update [--groups 4] [--repeats 5] [--out benchmarks/results/update_cpu.json]

Both sides train the same groups with the same model, engine and token budget, in turn. Their ratio is what PODS saves
of an update; the largest micro-batch (what a rank's memory grows with) is the same for both. `ratio` is of wall-clock
seconds; `cpu_ratio` is of the process's CPU seconds, which neighbours on a busy machine disturb far less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._groups import M, N, make_groups
from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.config import Config, build_config
from pods_cluster.learning import process_group
from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.trainer import Trainer

VOCABULARY, PROMPT, LONGEST = 2048, 24, 96
TARGET = 0.3


def config_for(model: Path, groups: int) -> Config:
    return build_config(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": PROMPT},
            "reward": [{"name": "math_answer"}],
            "generator": {"engine": "transformers", "rollouts_per_prompt": N, "max_tokens": LONGEST},
            "selector": {"keep": M},
            "learner": {"prompts_per_step": groups, "tokens_per_microbatch": 1024, "zero_stage": 2},
            "run": {"name": "benchmark", "steps": 1000},
        }
    )


def build_model(folder: Path) -> int:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=PROMPT + LONGEST,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(groups: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        parameters = build_model(Path(folder))
        config = config_for(Path(folder), groups)
        store = process_group.open_store("127.0.0.1", 1, 60)
        process_group.join(0, 1, "127.0.0.1", store.port, store=store, timeout=60, collective_timeout=600)
        trainer = Trainer(config, 0, 1)
        everyone, kept, rollouts = make_groups(
            groups, rng, vocabulary=VOCABULARY, prompt_tokens=PROMPT, longest=LONGEST
        )
        settings = plan_settings(config, packed=trainer.packed)
        plans = {"all": plan_step(everyone, settings), "kept": plan_step(kept, settings)}
        trainer.train(plans["kept"].ranks[0], rollouts, 1e-6)  # allocations and lazy set-up are not the update
        seconds: dict[str, list[float]] = {"all": [], "kept": []}
        cpu: dict[str, list[float]] = {"all": [], "kept": []}
        for _ in range(repeats):
            for name, plan in plans.items():
                before = time.process_time()
                seconds[name].append(trainer.train(plan.ranks[0], rollouts, 1e-6).seconds)
                cpu[name].append(time.process_time() - before)
        process_group.leave()
    report: dict[str, Any] = {"parameters": parameters, "groups": groups, "n": N, "m": M, "repeats": repeats}
    for name, plan in plans.items():
        report[name] = {
            "seconds": [round(value, 3) for value in seconds[name]],
            "cpu_seconds": [round(value, 3) for value in cpu[name]],
            "rollouts": plan.trained_rollouts,
            "completion_tokens": plan.trained_tokens,
            "tokens": sum(rank.tokens for rank in plan.ranks),
            "microbatches": len(plan.ranks[0].updates[0]),
            "largest_microbatch_tokens": plan.largest_microbatch,
        }
    report["ratio"] = _median_ratio(seconds)
    report["cpu_ratio"] = _median_ratio(cpu)
    report["target"] = TARGET
    report["full_update_at_least_2_s"] = min(seconds["all"]) >= 2.0
    return report


def _median_ratio(values: dict[str, list[float]]) -> float:
    """Median over the repeats of kept / all, each pair measured one after the other."""
    return round(statistics.median(kept / whole for kept, whole in zip(values["kept"], values["all"], strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "update_cpu.json")
    options = parser.parse_args()
    on = machine()
    report = measure(options.groups, options.repeats)
    write_result(options.out, {"benchmark": "update", "machine": on, **report})
    print(json.dumps(report, indent=1))
    whole, kept = statistics.median(report["all"]["seconds"]), statistics.median(report["kept"]["seconds"])
    print(f"update on {M} of {N}: {kept:.2f} s, on all {N}: {whole:.2f} s")
    print(f"ratio {report['ratio']:.3f} (CPU seconds: {report['cpu_ratio']:.3f}), target < {TARGET}")


if __name__ == "__main__":
    main()
