"""After updates, engine and learner are one model: token for token against the exported checkpoint in a fresh engine.

    python -m benchmarks.agreement configs/gsm8k-2gpu.yaml model.path=MODEL data.path=TRAIN data.name=null data.eval=null
    python -m benchmarks.agreement configs/quickstart.yaml --arms plain,process,tensor-parallel model.path=… data.path=… …

Each arm is a way for weights to reach vLLM. It starts a learner and an engine, publishes version 0, trains `--updates` updates
on the engine's own rollouts (any reward would do; even digits give every group a spread), publishes each, and compares: log-
probabilities of the sampled tokens (mean absolute difference, each update), fingerprints of all parameters on both ends,
greedy completions of `--prompts` prompts with those of the exported checkpoint in an engine that never saw an update (the same
batch), and with those from before the first update (which must differ). Arms run in processes of their own, `--at-once` of
them at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ARMS: dict[str, list[str]] = {
    "plain": [],
    "shared": ["learner.gpus_per_worker=0.5", "generator.gpus_per_worker=0.45"],
    "process": [
        "learner.gpus_per_worker=0.5",
        "generator.gpus_per_worker=0.45",
        "generator.engine_options.process=true",
        "generator.engine_options.enforce_eager=true",
    ],
    "native": ["generator.engine_options.transfer=native", "generator.engine_options.enforce_eager=true"],
    "reload": ["generator.engine_options.loading=reload", "generator.engine_options.enforce_eager=true"],
    "tensor-parallel": ["generator.tensor_parallel=2", "generator.engine_options.enforce_eager=true"],
    "tensor-parallel-zero3": [
        "generator.tensor_parallel=2",
        "generator.engine_options.enforce_eager=true",
        "learner.workers=2",
        "learner.zero_stage=3",
    ],
}


def settings(arm: str, arguments: argparse.Namespace, gpu: bool) -> list[str]:
    reward = Path(__file__).with_name("even_digits.py")
    chosen = [item for item in ARMS[arm] if gpu or "gpus_per_worker" not in item]
    return [
        f"run.name=agreement-{arm}",
        "generator.engine=vllm",
        "generator.workers=1",
        "generator.gpus_per_worker=null",
        "generator.rollouts_per_prompt=16",
        f"generator.max_tokens={arguments.max_tokens}",
        "generator.max_sequences=64",
        "selector.keep=8",
        "learner.prompts_per_step=8",
        f"learner.learning_rate={arguments.learning_rate}",
        "learner.warmup_steps=0",
        f"reward=[{{name: '{reward}:even_digits'}}]",
        "scoring.workers=1",
        *chosen,
        *arguments.overrides,
    ]


def arm_main(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import ray
    import torch

    from pods_cluster.config import load_config

    gpu = torch.cuda.is_available()
    config = load_config(arguments.config, settings(arm, arguments, gpu))
    ray.init(address="local", num_cpus=8, namespace="pods", include_dashboard=False, logging_level=logging.ERROR)
    try:
        return asyncio.run(measure(config, arguments, gpu))
    finally:
        ray.shutdown()


async def measure(config: Any, arguments: argparse.Namespace, gpu: bool) -> dict[str, Any]:
    import ray

    from pods_cluster.data import load_prompts, load_tokenizer
    from pods_cluster.generation.messages import Portion
    from pods_cluster.generation.pool import GeneratorPool
    from pods_cluster.learning.learner_group import LearnerGroup
    from pods_cluster.run.cluster import nccl_can_reach
    from pods_cluster.run.selector_handle import SelectorHandle
    from pods_cluster.types import GroupId
    from pods_cluster.weights.broadcast import Broadcaster
    from pods_cluster.weights.fingerprint import combined, difference

    cards = ray.cluster_resources().get("GPU", 0.0) if gpu else 0.0
    selector = SelectorHandle.start(config, config.run.name)
    pool, learners = GeneratorPool(config, selector.handle), LearnerGroup(config)
    try:
        await asyncio.gather(pool.start(), learners.start())
        broadcaster = Broadcaster(
            learners.handles,
            config.weights,
            config.run.name,
            gpus=nccl_can_reach(config, cards),
            ranks_per_worker=config.generator.tensor_parallel,
        )
        stream = load_prompts(config, load_tokenizer(config.model))
        probes = stream.next(arguments.prompts)
        reports = [await broadcaster.publish(0, pool.workers)]
        before = await greedy(pool, probes, arguments)
        differences: list[dict[str, float]] = []
        size = config.generator.rollouts_per_prompt
        for step in range(arguments.updates):
            groups = [
                (GroupId(prompt.epoch, prompt.row), prompt) for prompt in stream.next(config.learner.prompts_per_step)
            ]
            await selector.expect([(group, size) for group, _ in groups])
            await pool.submit([Portion(group, prompt, size, 0, size) for group, prompt in groups])
            selections: list[Any] = []
            while len(selections) < len(groups):
                selections += (await selector.collect(len(groups) - len(selections), step, 120.0)).selections
            result = await learners.train(selections, step)
            name = "sampling/sampling_logp_difference"
            differences.append({kind: result.metrics[f"{name}/{kind}"] for kind in ("mean", "max")})
            reports.append(await broadcaster.publish(step + 1, pool.workers))
        sent, *_ = await asyncio.gather(*(rank.weights_fingerprints.remote() for rank in learners.handles))
        [worker] = pool.workers.values()
        held = await worker.fingerprints.remote()
        after = await greedy(pool, probes, arguments)
        with tempfile.TemporaryDirectory() as folder:
            await learners.export(Path(folder) / "export")
            await pool.close()
            fresh = await fresh_engine(config, Path(folder) / "export", probes, arguments)
    finally:
        await pool.close()
        await learners.close()
    return {
        "transport": broadcaster.transport,
        "publish_seconds": [round(report.seconds, 4) for report in reports],
        "failed": {name: reason for report in reports for name, reason in report.failed.items()},
        "logprob_difference": differences,
        "parameters": len(sent),
        "fingerprints": difference(sent, held) or "equal",
        "fingerprint": combined(sent),
        "greedy_equal_to_fresh_engine": sum(a == b for a, b in zip(after, fresh, strict=True)),
        "greedy_equal_to_before": sum(a == b for a, b in zip(after, before, strict=True)),
        "prompts": len(probes),
    }


async def fresh_engine(config: Any, export: Path, probes: Any, arguments: argparse.Namespace) -> list[str]:
    from pods_cluster.generation.pool import GeneratorPool

    model = config.model.model_copy(update={"path": str(export)})
    run = config.run.model_copy(update={"name": f"{config.run.name}-fresh"})
    pool = GeneratorPool(config.model_copy(update={"model": model, "run": run}), None)
    try:
        await pool.start()
        await pool.adopt_version(0)
        return await greedy(pool, probes, arguments)
    finally:
        await pool.close()


async def greedy(pool: Any, probes: Any, arguments: argparse.Namespace) -> list[str]:
    from pods_cluster.types import SamplingParams

    rows = await pool.evaluate(probes, SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens), 1)
    return [row.samples[0].text for row in rows]


def run_arm(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.agreement", *sys.argv[1:], "--arm", arm]
    cards = dict(pair.split(":") for pair in arguments.cards.split(",") if pair)
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": cards[arm].replace("+", ",")} if arm in cards else {})}
    with tempfile.TemporaryFile("w+") as log:
        try:
            call = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=arguments.timeout, env=environment
            )
            if call.returncode == 0:
                return json.loads(call.stdout.strip().splitlines()[-1])
            why = f"exit status {call.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not done within {arguments.timeout:g} s"
        log.seek(0)
        return {"error": f"{why}: {log.read()[-1500:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="name=value, as for pods train")
    parser.add_argument("--arms", default="shared,process,native,reload,tensor-parallel", help=", ".join(ARMS))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--cards", default="", help="an arm's cards where several run at once: shared:0,native:0+1")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of an arm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.arm:
        print(json.dumps(arm_main(arguments.arm, arguments)))
        return
    from benchmarks._machine import machine
    from benchmarks._result_file import write_result

    result: dict[str, Any] = {"benchmark": "agreement", "machine": machine(), "arms": {}}
    result |= {name: getattr(arguments, name) for name in ("updates", "prompts", "max_tokens", "learning_rate")}
    names = arguments.arms.split(",")
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for name, found in zip(names, threads.map(lambda arm: run_arm(arm, arguments), names), strict=True):
            result["arms"][name] = {"settings": ARMS[name], **found}
            print(name, json.dumps(found), flush=True)
            if arguments.out:
                write_result(arguments.out, result)


if __name__ == "__main__":
    main()
