"""How fast the built-in engine generates on one thread, against transformers' batched `generate` in the same run.

    python -m benchmarks.engine_cpu

A decoder of about a million parameters, groups of 64 rollouts, temperature 1. Three cases: short completions of equal
length, longer ones, and lengths that differ (a random end token; `generate` computes finished rows to the end). Both
count the tokens up to each rollout's end alone. Rounds take turns, and CPU seconds are reported beside wall seconds:
other work on the machine slows the clock, not the count. Target: a ratio of at least 1. Writes
`benchmarks/results/engine_cpu.json`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.types import GroupId, RolloutRequest, SamplingParams

RESULT = Path(__file__).parent / "results" / "engine_cpu.json"
ROUNDS = 5
END = 2


@dataclass(frozen=True, slots=True)
class Case:
    """`groups` prompts of `prompt` tokens, 64 rollouts each, up to `new` tokens."""

    name: str
    groups: int
    prompt: int
    new: int
    vocabulary: int
    ends: bool
    rollouts: int = 64


CASES = (
    Case("short", groups=8, prompt=7, new=4, vocabulary=16, ends=False),
    Case("longer", groups=8, prompt=32, new=48, vocabulary=32, ends=False),
    Case("uneven", groups=8, prompt=32, new=96, vocabulary=32, ends=True),
)


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for case in CASES:
        result = measure(case)
        results.append(result)
        print(
            f"{case.name:8} engine {result['engine']['tokens_per_cpu_second']:>8,.0f} tok/CPU s, "
            f"generate {result['generate']['tokens_per_cpu_second']:>8,.0f}, ratio {result['ratio_cpu']:.2f} "
            f"(wall {result['ratio_wall']:.2f})"
        )
    write_result(RESULT, {"machine": machine(), "threads": 1, "cases": results})


def measure(case: Case) -> dict[str, Any]:
    model = _model(case)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, case.vocabulary, (case.groups, case.prompt), generator=generator)
    ways: dict[str, Callable[[int], int]] = {
        "engine": lambda seed: _engine(case, model, prompts, seed),
        "generate": lambda seed: _generate(case, model, prompts, seed),
    }
    for way in ways.values():
        way(0)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(1, ROUNDS + 1):
        for name, way in ways.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            tokens = way(seed)
            wall[name].append(tokens / (time.perf_counter() - began))
            cpu[name].append(tokens / (time.process_time() - began_cpu))
    result: dict[str, Any] = {**asdict(case), "parameters": sum(p.numel() for p in model.parameters())}
    for name in ways:
        result[name] = {
            "tokens_per_second": round(statistics.median(wall[name]), 1),
            "tokens_per_cpu_second": round(statistics.median(cpu[name]), 1),
        }
    for kind, rates in (("wall", wall), ("cpu", cpu)):
        ratios = [a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)]
        result[f"ratio_{kind}"] = round(statistics.median(ratios), 3)
    return result


def _model(case: Case) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
    )
    return Qwen2ForCausalLM(config).eval()


def _engine(case: Case, model: Qwen2ForCausalLM, prompts: torch.Tensor, seed: int) -> int:
    sampling = SamplingParams(max_tokens=case.new, seed=seed)
    engine = TransformersEngine(model, [END] if case.ends else [], max_sequences=case.groups * case.rollouts)
    engine.version = 0
    ids = [tuple(prompt) for prompt in prompts.tolist()]
    engine.submit(
        [
            RolloutRequest(GroupId(0, row), index, prompt, sampling)
            for row, prompt in enumerate(ids)
            for index in range(case.rollouts)
        ]
    )
    tokens = 0
    while engine.in_flight:
        tokens += sum(len(rollout.token_ids) for rollout in engine.step())
    return tokens


def _generate(case: Case, model: Qwen2ForCausalLM, prompts: torch.Tensor, seed: int) -> int:
    model.set_attn_implementation("sdpa")
    torch.manual_seed(seed)
    ids = prompts.repeat_interleave(case.rollouts, 0)
    options: dict[str, Any] = {"eos_token_id": END if case.ends else None}
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.new,
            pad_token_id=0,
            **options,
        )
    new = output[:, case.prompt :]
    if not case.ends:
        return new.numel()
    ended = (new == END).int().cumsum(-1)
    return int((ended - (new == END).int() == 0).sum())


if __name__ == "__main__":
    main()
