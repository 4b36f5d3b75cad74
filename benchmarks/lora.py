"""Adapters against whole weights on a real model: bytes, seconds, and whether the engines compute what the learner does.

    python -m benchmarks.lora MODEL PROMPTS.jsonl [--out benchmarks/results/lora_cpu.json]

A random adapter of rank 64 and alpha 64 on all linear layers goes over gloo into the built-in engine and into vLLM (its CPU
build, where it is installed). In float32 greedy tokens must equal those of the merged model; in bfloat16 the engine's
log-probabilities are compared with base + adapter as PEFT computes them. Part `bfloat16` says what of that difference
is the merge: on given texts, what rounding the merged weights changes by itself (target: 0.02 on average), beside what
bfloat16 arithmetic changes without any adapter. Results of earlier calls stay in the file, but for what is measured anew.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.config import Config, LoraConfig, build_config
from pods_cluster.generation.engines.factory import make_engine
from pods_cluster.learning.forward import unwrap_peft
from pods_cluster.learning.policy_model import add_adapters
from pods_cluster.learning.weight_source import AdapterWeights, ModelWeights
from pods_cluster.types import GroupId, RolloutRequest, SamplingParams
from pods_cluster.weights.fingerprint import difference
from pods_cluster.weights.protocol import Invitation, WeightSource, WeightUpdate, plan_buckets
from pods_cluster.weights.sender import WeightSender

TOKENS = 24
TIMEOUT = 600.0


def config_for(model: str, dtype: str, engine: str) -> Config:
    return build_config(
        {
            "model": {"path": model, "dtype": dtype},
            "data": {"path": "rows.jsonl", "max_prompt_tokens": 256},
            "reward": [{"name": "math_answer"}],
            "generator": {"engine": engine, "max_tokens": TOKENS, "max_sequences": 8, "rollouts_per_prompt": 2},
            "selector": {"keep": 2},
            "learner": {"lora": {"rank": 64, "alpha": 64}},
            "run": {"name": "lora"},
        }
    )


def adapted(model: Any, size: float = 0.02, seed: int = 0) -> Any:
    """With adapters whose B, zero at the start, is as if trained."""
    torch.manual_seed(seed)
    peft_model = add_adapters(model, LoraConfig())
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn(parameter.shape).to(parameter.dtype)
    return peft_model


def publish(source: WeightSource, engine: Any, version: int) -> tuple[float, int]:
    """Seconds and bytes of one version, a rendezvous of two included."""
    sender = WeightSender(source, 0, host="127.0.0.1")
    specs = source.specs()
    update = WeightUpdate(version, specs, plan_buckets(specs, 256 * 2**20), TIMEOUT)
    host, port = sender.open("gloo", f"lora/{version}", 1, TIMEOUT)

    def send() -> None:
        sender.connect(TIMEOUT)
        sender.send(update)

    began = time.monotonic()
    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    engine.connect(Invitation("gloo", host, port, 2, 1, f"lora/{version}", TIMEOUT))
    engine.receive(update)
    sending.join(TIMEOUT)
    seconds = time.monotonic() - began
    sender.close()
    return seconds, update.nbytes


def generate(engine: Any, prompts: Sequence[tuple[int, ...]], row: int) -> list[Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    requests = [RolloutRequest(GroupId(row, place), 0, prompt, sampling) for place, prompt in enumerate(prompts)]
    engine.submit(requests)
    done: dict[str, Any] = {}
    while engine.in_flight:
        done |= {rollout.key: rollout for rollout in engine.step()}
    return [done[request.key] for request in requests]


@torch.inference_mode()
def log_probs(model: Any, rollout: Any) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    start = len(rollout.prompt_ids)
    logits = model(input_ids=ids).logits[0, start - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None]).squeeze(-1)


@torch.inference_mode()
def greedy(model: Any, prompt: tuple[int, ...], ends: set[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(TOKENS):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], -1)
        if int(ids[0, -1]) in ends:
            break
    return ids[0, len(prompt) :].tolist()


def measure(path: str, dtype: str, engine_name: str, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    learner = adapted(copy.deepcopy(model)).eval()
    plain = unwrap_peft(learner)
    engine: Any = make_engine(config_for(path, dtype, engine_name), tokenizer)
    try:
        whole, alone = ModelWeights(learner, 0, zero_stage=1), AdapterWeights(learner, 0, zero_stage=1)
        first, nbytes = publish(alone, engine, 0)
        second, _ = publish(alone, engine, 1)
        made = generate(engine, prompts, 1)
        sent = WeightSender(alone, 0, computed=whole).fingerprints()
        result: dict[str, Any] = {
            "adapter_bytes": nbytes,
            "first_seconds": round(first, 3),
            "seconds": round(second, 3),
            "fingerprints": difference(sent, engine.fingerprints()) or "equal",
            "tokens": sum(len(rollout.token_ids) for rollout in made),
        }
        apart = torch.cat([(torch.tensor(r.logprobs) - log_probs(plain, r)).abs() for r in made])
        moved = torch.cat([(log_probs(model, r) - log_probs(plain, r)).abs() for r in made])
        result["logp_difference_mean"] = round(float(apart.mean()), 6)
        result["logp_difference_max"] = round(float(apart.max()), 6)
        result["adapter_moves_logp_by"] = round(float(moved.mean()), 4)
        if dtype == "float32":
            merged = cast(Any, copy.deepcopy(learner)).merge_and_unload().eval()
            ends = {int(token) for token in _ends(model, tokenizer)}
            equal = [rollout.token_ids == greedy(merged, rollout.prompt_ids, ends) for rollout in made]
            result["greedy_equal"] = f"{sum(equal)} of {len(equal)}"
        result["whole_seconds"] = round(publish(whole, engine, 2)[0], 3)
        result["whole_bytes"] = sum(spec.nbytes for spec in whole.specs())
        return result
    finally:
        engine.close()


@torch.inference_mode()
def rounding(path: str, texts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Mean and largest absolute difference of the texts' log-probabilities, between pairs of models."""
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    learner = adapted(copy.deepcopy(base)).eval()
    exact = copy.deepcopy(learner).float()
    merged = cast(Any, copy.deepcopy(exact)).merge_and_unload().bfloat16().eval()
    models = {
        "base + adapter, float32": unwrap_peft(exact),
        "base + adapter, bfloat16": unwrap_peft(learner),
        "merged, bfloat16": merged,
        "merged and rounded to bfloat16, computed in float32": copy.deepcopy(merged).float(),
        "base, bfloat16": base,
        "base, float32": copy.deepcopy(base).float(),
    }
    found = {name: torch.cat([_text_log_probs(model, text) for text in texts]) for name, model in models.items()}
    pairs = [
        ("merged and rounded to bfloat16, computed in float32", "base + adapter, float32"),
        ("merged, bfloat16", "base + adapter, float32"),
        ("base + adapter, bfloat16", "base + adapter, float32"),
        ("merged, bfloat16", "base + adapter, bfloat16"),
        ("base, bfloat16", "base, float32"),
    ]
    result: dict[str, Any] = {"tokens": len(found["base, float32"])}
    for one, other in pairs:
        apart = (found[one] - found[other]).abs()
        result[f"{one} | {other}"] = {"mean": round(float(apart.mean()), 5), "max": round(float(apart.max()), 4)}
    return result


def _text_log_probs(model: Any, text: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([text])
    logits = model(input_ids=ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    return [*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="a JSONL file with columns `question` and `answer`")
    parser.add_argument("--engines", nargs="*", default=["transformers", "vllm"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()[: arguments.rows]]
    prompts = [tuple(tokenizer(row["question"])["input_ids"])[:200] for row in rows]
    texts = [tuple(tokenizer(f"{row['question']} {row['answer']}")["input_ids"])[:220] for row in rows]
    result: dict[str, Any] = {}
    if arguments.out and arguments.out.is_file():
        result = json.loads(arguments.out.read_text())
    result |= {"machine": machine(), "model": Path(arguments.model).name, "rank": 64, "alpha": 64}
    result["bfloat16"] = rounding(arguments.model, texts)
    print("bfloat16", json.dumps(result["bfloat16"]), flush=True)
    for engine in arguments.engines:
        for dtype in arguments.dtypes:
            result[f"{engine} {dtype}"] = found = measure(arguments.model, dtype, engine, prompts)
            print(engine, dtype, json.dumps(found), flush=True)
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
