"""Both ends hold the same weights: by fingerprint, by log-probabilities, and token for token against a fresh load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_cluster.client.demo import CONFIG
from pods_cluster.config import Config, load_config
from pods_cluster.data import load_prompts, load_tokenizer
from pods_cluster.generation.messages import Portion
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.run.selector_handle import SelectorHandle
from pods_cluster.types import GroupId, Prompt, SamplingParams
from pods_cluster.weights.broadcast import Broadcaster
from pods_cluster.weights.fingerprint import difference
from tests.tiny_run import Made


class Generators:
    """Two workers and a selector for all tests here: each learner group sends its weights over those of the last one."""

    def __init__(self, config: Config) -> None:
        self.selector = SelectorHandle.start(config, config.run.name)
        self.pool = GeneratorPool(config, self.selector.handle)
        self.learners = 0

    async def start(self) -> None:
        """Called beside the start of each learner group, as a run starts both."""
        if not self.pool.workers:
            await self.pool.start()
        self.learners += 1

    @property
    def first_version(self) -> int:
        return 10 * (self.learners - 1)

    def group(self, prompt: Prompt) -> GroupId:
        """The groups of each learner group are other attempts."""
        return GroupId(prompt.epoch, prompt.row, self.learners - 1)


def settings(made: Made, *more: str) -> Config:
    reward = Path(__file__).parent / "rewards.py"
    return load_config(
        CONFIG,
        [
            *made.overrides(Path("unused")),
            f"reward.0.name={reward}:even_digits",
            "learner.prompts_per_step=4",
            "learner.learning_rate=1e-3",
            "generator.workers=2",
            "generator.rollouts_per_prompt=8",
            "generator.temperature=0.7",
            "weights.bucket_megabytes=0.5",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def generators(cluster: None, made: Made) -> Iterator[Generators]:
    generators = Generators(settings(made, "run.name=agree"))
    yield generators
    asyncio.run(generators.pool.close())
    ray.kill(generators.selector.handle)


# The adapter comes first: an engine that took whole weights refuses one.
@pytest.mark.parametrize(
    ("zero_stage", "ranks", "lora"),
    [pytest.param(2, 2, "{rank: 8, alpha: 8}", marks=pytest.mark.slow), (1, 1, None), (3, 2, None)],
)
def test_after_updates_engine_and_learner_are_one_model(
    generators: Generators, made: Made, tmp_path: Path, zero_stage: int, ranks: int, lora: str | None
):
    config = settings(
        made,
        f"run.name=agree-{zero_stage}",
        f"learner.workers={ranks}",
        f"learner.zero_stage={zero_stage}",
        f"learner.lora={lora or 'null'}",
    )
    asyncio.run(_check(config, generators, tmp_path / "export"))


async def _check(config: Config, generators: Generators, export: Path) -> None:
    pool, learners = generators.pool, LearnerGroup(config)
    try:
        await asyncio.gather(generators.start(), learners.start())
        version = generators.first_version
        stream = load_prompts(config, load_tokenizer(config.model))
        broadcaster = Broadcaster(learners.handles, config.weights, config.run.name)
        assert not (await broadcaster.publish(version, pool.workers)).failed
        handle = generators.selector
        for step in range(2):
            prompts = stream.next(config.learner.prompts_per_step)
            groups = [(generators.group(prompt), prompt) for prompt in prompts]
            size = config.generator.rollouts_per_prompt
            await handle.expect([(group, size) for group, _ in groups])
            await pool.submit([Portion(group, prompt, size, 0, size) for group, prompt in groups])
            selections: list[Any] = []
            while len(selections) < len(groups):
                selections += (await handle.collect(len(groups) - len(selections), version, 30.0)).selections
            result = await learners.train(selections, step)
            assert result.lost == []
            assert result.trained_rollouts == len(groups) * config.selector.keep
            # The engine's log-probabilities are the learner's: same weights, same temperature, same tokens.
            assert result.metrics["sampling/sampling_logp_difference/max"] < 1e-4
            version += 1
            report = await broadcaster.publish(version, pool.workers)
            assert not report.failed
        if config.sends_adapter:
            whole = sum(spec.nbytes for spec in await learners.handles[0].weights_specs.remote())
            assert report.nbytes == whole < _bytes(config.model.path) / 2
            # A newcomer has only what model.path holds; the adapter makes it one of the others.
            name = await pool.replace(next(iter(pool.workers)))
            assert not (await broadcaster.catch_up(version, name, pool.workers[name])).failed
        sent = await asyncio.gather(*(rank.weights_fingerprints.remote() for rank in learners.handles))
        for worker in pool.workers.values():
            assert difference(sent[0], await worker.fingerprints.remote()) == ""
        pairs = [(prompt.token_ids, (3, 4, 5, 6)) for prompt in stream.next(3)]
        expected = await learners.score(pairs, config.generator.temperature)
        for worker in pool.workers.values():
            got = await worker.score.remote(pairs, config.generator.temperature)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        await learners.export(export)
        await _equals_fresh_load(pool, stream, export)
    finally:
        await learners.close()


def _bytes(path: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return sum(4 * parameter.numel() for parameter in model.parameters())


async def _equals_fresh_load(pool: GeneratorPool, stream: Any, export: Path) -> None:
    """Greedy decoding on the pool's weights against transformers' own on the exported checkpoint."""
    prompts = stream.next(6)
    rows = await pool.evaluate(prompts, SamplingParams(temperature=0.0, max_tokens=6), 1)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    for prompt, row in zip(prompts, rows, strict=True):
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        completion = output[0, ids.shape[1] :].tolist()
        while completion and completion[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            completion.pop()
        expected = tokenizer.decode(completion)
        assert row.samples[0].text == expected
