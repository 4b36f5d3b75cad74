"""New weights from a DeepSpeed learner to vLLM generators: seconds, GB/s, and proof that both ends agree.

    python -m benchmarks.weights --shape 3b --generators 1            # a GPU each for the learner and every generator
    python -m benchmarks.weights --shape tiny --engine transformers   # the same path over gloo on a CPU

Random weights of Qwen2.5's shapes; speed does not depend on their values. The first publish builds the broadcast group, later
ones use it. 256 requests are in flight meanwhile, and each worker's tokens are counted every few milliseconds (`pauses`): how
long none came, and how many fewer than at the rate before came until the rate was back to 90 % of it: the running requests
compute their keys and values anew under the new weights. Writes `benchmarks/results/weights_<shape>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from benchmarks._machine import machine
from benchmarks._model_shapes import SHAPES
from benchmarks._result_file import write_result
from pods_cluster.config import Config, build_config
from pods_cluster.generation.messages import Portion
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.types import GroupId, Prompt
from pods_cluster.weights.broadcast import Broadcaster
from pods_cluster.weights.fingerprint import difference


def link_speed() -> float | None:
    """Bytes/s of plain copies of 1 GiB from the first card to the second (the best of five turns); None with one card."""
    import torch

    if torch.cuda.device_count() < 2:
        return None
    source = torch.zeros(2**30, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.monotonic()
        for _ in range(4):
            target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.monotonic() - began)
    speed = 4 * source.nbytes / min(times)
    del source, target
    torch.cuda.empty_cache()
    return speed


def make_model(shape: str, folder: Path, gpu: bool) -> None:
    """Random weights with the quickstart's tokenizer, whose few tokens every vocabulary holds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from pods_cluster.quickstart.character_tokenizer import build_tokenizer

    tokenizer: Any = build_tokenizer()
    config = Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
        model = model.to(torch.bfloat16 if gpu else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def configuration(arguments: argparse.Namespace, model: Path, gpu: bool) -> Config:
    generator: dict[str, Any] = {
        "engine": arguments.engine,
        "workers": arguments.generators,
        "tensor_parallel": arguments.tensor_parallel,
        "rollouts_per_prompt": 32,
        "max_tokens": arguments.max_tokens,
        "max_sequences": 256,
        "engine_options": {"loading": arguments.loading} if arguments.engine == "vllm" else {},
    }
    return build_config(
        {
            "model": {"path": str(model), "dtype": "bfloat16" if gpu else "float32"},
            "data": {"path": "unused.jsonl", "max_prompt_tokens": 64},
            "reward": [{"name": "exact_match"}],
            "generator": generator,
            "selector": {"keep": 8},
            "learner": {
                "workers": arguments.learners,
                "zero_stage": arguments.zero_stage,
                "tokens_per_microbatch": 8192,
                "gradient_checkpointing": gpu,
            },
            "weights": {
                "bucket_megabytes": arguments.bucket_megabytes,
                "staged": {"auto": "auto", "on": True, "off": False}[arguments.staged],
                "keep_cache": arguments.keep_cache,
            },
            "run": {"name": f"bench-weights-{arguments.shape}"},
        }
    )


async def measure(arguments: argparse.Namespace, config: Config, gpu: bool) -> dict[str, Any]:
    pool, learners = GeneratorPool(config, None), LearnerGroup(config)
    try:
        began = time.monotonic()
        await asyncio.gather(pool.start(), learners.start())
        result: dict[str, Any] = {"start_seconds": round(time.monotonic() - began, 1)}
        broadcaster = Broadcaster(
            learners.handles,
            config.weights,
            config.run.name,
            gpus=gpu,
            ranks_per_worker=config.generator.tensor_parallel,
        )
        reports = [await broadcaster.publish(0, pool.workers)]
        if arguments.load:
            await load(pool)
        watch = Watch(pool)
        for version in range(1, arguments.publishes + 1):
            await asyncio.sleep(arguments.pause)
            watch.mark()
            reports.append(await broadcaster.publish(version, pool.workers))
        await asyncio.sleep(arguments.pause)
        pauses = await watch.end()
        failed = {name: reason for report in reports for name, reason in report.failed.items()}
        later = [report.seconds for report in reports[1:]]
        result |= {
            "transport": broadcaster.transport,
            "bytes": reports[0].nbytes,
            "first_seconds": round(reports[0].seconds, 4),
            "seconds": [round(value, 4) for value in later],
            "median_seconds": round(statistics.median(later), 4),
            "gigabytes_per_second": round(reports[0].nbytes / statistics.median(later) / 1e9, 2),
            "failed": failed,
            "pauses": pauses,
        }
        workers = await asyncio.gather(*(worker.stats.remote() for worker in pool.workers.values()))
        result["staged"] = [stats.staged for stats in workers]
        result["staging_seconds"] = [round(stats.staging_seconds / max(1, stats.staged), 4) for stats in workers]
        result["agreement"] = await agreement(pool, learners)
        return result
    finally:
        await pool.close()
        await learners.close()


class Watch:
    """Counts the tokens of all workers, over and over, until `end`."""

    EVERY, SPAN = 0.004, 0.2
    """Seconds between two looks, and those that a rate is taken over."""

    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool
        self._marks: list[float] = []
        self._seen: list[tuple[float, int, int]] = []  # when, tokens made, requests finished
        self._task = asyncio.ensure_future(self._look())

    def mark(self) -> None:
        """An update begins."""
        self._marks.append(time.monotonic())

    async def _look(self) -> None:
        while True:
            stats = await asyncio.gather(*(worker.stats.remote() for worker in self._pool.workers.values()))
            engines = [found.engine for found in stats]
            tokens, finished = sum(one.generated_tokens for one in engines), sum(one.finished for one in engines)
            self._seen.append((time.monotonic(), tokens, finished))
            await asyncio.sleep(self.EVERY)

    async def end(self) -> list[dict[str, float]]:
        self._task.cancel()
        # Once requests end, fewer tokens come without any update: what follows is not counted.
        until = next((at for at, _, finished in self._seen if finished > self._seen[0][2]), self._seen[-1][0])
        ends = [min(end, until) for end in (*self._marks[1:], self._seen[-1][0])]
        return [self._pause(mark, end) for mark, end in zip(self._marks, ends, strict=True) if mark + self.SPAN < end]

    def _pause(self, mark: float, end: float) -> dict[str, float]:
        rate = self._rate(mark, 3 * self.SPAN)
        after = [(at, tokens) for at, tokens, _ in self._seen if mark <= at <= end]
        moved = [before[0] for before, now in pairwise(after) if now[1] > before[1]]
        gaps = [later - earlier for earlier, later in zip([mark, *moved], [*moved, end], strict=True)]
        back = next((at for at, _ in after if at > mark + self.SPAN and self._rate(at, self.SPAN) >= 0.9 * rate), end)
        made = self._at(back) - self._at(mark)
        return {
            "rate_before": round(rate),
            "longest_gap_seconds": round(max(gaps), 4),
            "back_to_90_percent_after_seconds": round(back - mark, 3),
            "tokens_lost": round(rate * (back - mark) - made),
        }

    def _at(self, moment: float) -> int:
        return next((tokens for at, tokens, _ in reversed(self._seen) if at <= moment), 0)

    def _rate(self, moment: float, span: float) -> float:
        return (self._at(moment) - self._at(moment - span)) / span


async def load(pool: GeneratorPool) -> None:
    """Fill the engines, so that an update comes between the steps of requests that run."""
    prompts = [Prompt(0, row, "", tuple(4 + (row + place) % 8 for place in range(16))) for row in range(8)]
    await pool.submit([Portion(GroupId(0, prompt.row), prompt, 32, 0, 32) for prompt in prompts])
    await asyncio.sleep(0.5)


async def agreement(pool: GeneratorPool, learners: LearnerGroup) -> dict[str, Any]:
    """Agreement of both ends: the same tokens scored by the learner and by every generator, and fingerprints."""
    pairs = [([4 + (row + place) % 8 for place in range(16)], [4 + (3 * row + place) % 8 for place in range(32)])
             for row in range(16)]  # fmt: skip
    expected = [value for row in await learners.score(pairs, 1.0) for value in row]
    sent = (await asyncio.gather(*(rank.weights_fingerprints.remote() for rank in learners.handles)))[0]
    found: dict[str, Any] = {}
    for name, worker in pool.workers.items():
        got = [value for row in await worker.score.remote(pairs, 1.0) for value in row]
        gaps = [abs(one - other) for one, other in zip(got, expected, strict=True)]
        found[name] = {
            "mean_logprob_difference": round(sum(gaps) / len(gaps), 6),
            "max_logprob_difference": round(max(gaps), 6),
            "fingerprints": difference(sent, await worker.fingerprints.remote()) or "equal",
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="cards of a generator")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--publishes", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between publishes")
    parser.add_argument(
        "--loading", choices=("auto", "reload"), default="auto", help="vLLM: see engine_options.loading"
    )
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--bucket-megabytes", type=float, default=256.0)
    parser.add_argument("--staged", choices=("auto", "on", "off"), default="auto", help="see weights.staged")
    parser.add_argument("--keep-cache", action="store_true", help="see weights.keep_cache")
    parser.add_argument("--no-load", dest="load", action="store_false", help="publish to idle engines")
    parser.add_argument("--out")
    arguments = parser.parse_args()

    import torch

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        make_model(arguments.shape, Path(scratch) / "model", gpu)
        if gpu:
            torch.cuda.empty_cache()
        speed = link_speed() if gpu else None
        cpus = arguments.generators * arguments.tensor_parallel + arguments.learners + 1
        ray.init(address="local", num_cpus=cpus, namespace="pods", include_dashboard=False, logging_level=logging.ERROR)
        try:
            result = asyncio.run(measure(arguments, configuration(arguments, Path(scratch) / "model", gpu), gpu))
        finally:
            ray.shutdown()
    if speed:
        result["link_gigabytes_per_second"] = round(speed / 1e9, 1)
        result["share_of_link"] = round(result["gigabytes_per_second"] * 1e9 / speed, 3)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    out = Path(arguments.out or f"benchmarks/results/weights_{arguments.shape}.json")
    write_result(out, {"machine": machine(), "settings": settings, **result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
