"""One engine of an arm of `engine.py`, in a process of its own: it starts, waits for the others, and is timed."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_arms import Arm


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
            self._engine.rescore(rollouts[: int(self._arm.rescore * len(rollouts))], sampling.temperature)
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
    child(json.loads(Path(sys.argv[1]).read_text()))
