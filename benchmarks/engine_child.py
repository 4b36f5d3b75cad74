"""One engine of an arm of `engine.py`, in a process of its own: it starts, waits for the others, and is timed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.engine_arms import Arm


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
    bench.round(0, plan["group_sizes"][0], min(16, plan["max_tokens"]))
    rounds = []
    for turn, group_size in enumerate(plan["group_sizes"] * plan["repeats"]):
        wait_for_others(plan, turn)
        if not arm.collect:
            gc.collect()
            gc.freeze()
            gc.disable()
        begin = time.time()
        tokens, steps = bench.round(turn + 1, group_size, plan["max_tokens"])
        end = time.time()
        step_ms = 1000 * (end - begin) / max(1, steps)
        row = {"group_size": group_size, "begin": begin, "end": end, "tokens": tokens, "step_ms": step_ms}
        rounds.append(row | {"digest": bench.digest()})
    profile = None
    if plan["profile"]:
        try:
            profile = bench.profile()
        except Exception as error:  # the rounds' figures are kept
            profile = {"error": f"{type(error).__name__}: {error}"}
    return {"start_seconds": start_seconds, "rounds": rounds, "profile": profile, **bench.facts()}


def wait_for_others(plan: dict[str, Any], turn: int) -> None:
    """Every engine of the arm begins a round at the same time."""
    folder = Path(plan["folder"])
    (folder / f"ready{turn}.{plan['number']}").touch()
    while not (folder / f"go{turn}").exists():
        time.sleep(0.01)


def make_prompts(plan: dict[str, Any], group_size: int, turn: int) -> list[tuple[int, ...]]:
    """One prompt for each `group_size` sequences; new ones each round: the prefix cache helps only within it."""
    rng = random.Random(1000 * turn + plan["number"])
    config = json.loads((Path(plan["model"]) / "config.json").read_text())
    groups = max(1, plan["sequences"] // group_size)
    pool = [tuple(rng.randrange(10, config["vocab_size"]) for _ in range(plan["prompt_tokens"])) for _ in range(groups)]
    return [pool[min(index // group_size, groups - 1)] for index in range(plan["sequences"])]


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
        from pods_cluster.generation.engines.vllm.start import make_vllm_engine

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
        self._last: list[Any] = []
        self._engine = make_vllm_engine(config, None)
        self._engine.version = 0
        self._engine._end_ids = ()  # every sequence has the same length

    def submit(self, turn: int, group_size: int, max_tokens: int) -> float:
        """A full load of requests; their temperature."""
        from pods_cluster.types import GroupId, RolloutRequest, SamplingParams

        wanted = self._arm.logprobs or self._arm.rescore > 0
        sampling = SamplingParams(max_tokens=max_tokens, seed=turn, logprobs=wanted)
        self._engine.submit(
            [
                RolloutRequest(GroupId(turn, index // group_size), index % group_size, prompt, sampling)
                for index, prompt in enumerate(make_prompts(self._plan, group_size, turn))
            ]
        )
        return sampling.temperature

    def round(self, turn: int, group_size: int, max_tokens: int) -> tuple[int, int]:
        temperature = self.submit(turn, group_size, max_tokens)
        rollouts, steps = [], 0
        while self._engine.in_flight:
            rollouts += self._engine.step()
            steps += 1
        if self._arm.rescore:
            self._engine.rescore(rollouts[: int(self._arm.rescore * len(rollouts))], temperature)
        self._last = rollouts
        return sum(len(rollout.token_ids) for rollout in rollouts), steps

    def digest(self) -> str:
        """Digest of the last round's tokens: equal for arms that must make the same rollouts."""
        rows = sorted((str(rollout.group), rollout.index, list(rollout.token_ids)) for rollout in self._last)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def profile(self) -> dict[str, Any] | None:
        from benchmarks.engine_profile import profile

        if self._engine._core.process:
            return None
        return profile(self._engine, lambda: self.submit(10**6, 1, self._plan["max_tokens"]))

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
        from pods_cluster.generation.engines.vllm import compat, start

        start.prepare_environment(process=False, threads=1)
        from vllm import LLM

        options = engine_options(plan, arm)
        length = plan["prompt_tokens"] + plan["max_tokens"] + 1
        if compat.on_gpu():
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

    def round(self, turn: int, group_size: int, max_tokens: int) -> tuple[int, int]:
        from vllm import SamplingParams

        prompts = make_prompts(self._plan, group_size, turn)[::group_size]
        sampling = SamplingParams(
            n=group_size,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if self._arm.logprobs else None,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        return sum(len(part.token_ids) for output in outputs for part in output.outputs), max_tokens

    def digest(self) -> None:
        return None

    def profile(self) -> None:
        return None

    def facts(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    child(json.loads(Path(sys.argv[1]).read_text()))
