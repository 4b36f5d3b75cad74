"""Accuracy on held-out rows: greedy, and sampled where asked for, all on one weight version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.config import Config, RewardConfig
from pods_cluster.generation.messages import EvalRow
from pods_cluster.run.stages import Generators
from pods_cluster.scoring.reward_range import range_slack
from pods_cluster.scoring.reward_registry import declared_range
from pods_cluster.types import Prompt, SamplingParams


@dataclass(slots=True)
class EvalReport:
    """Metrics `eval/…`, and what each row came to: see `RunFolder.read_evals`."""

    values: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)


async def evaluate(pool: Generators, prompts: Sequence[Prompt], config: Config) -> EvalReport:
    """Evaluate the weights that the pool serves now on held-out prompts.

    A completion is correct when its first reward with a positive weight is at the top of that reward's range (1 for
    accuracy rewards). Rows without a valid reward count in `eval/failed` and in no mean.
    """
    settings, seed = config.run.eval, config.run.seed
    max_tokens = settings.max_tokens or config.generator.max_tokens
    stops = config.generator.stop_ids
    strings = tuple(config.generator.stop_strings)
    greedy = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, seed=seed, stop_token_ids=stops, stop_strings=strings, logprobs=False
    )
    rows = await pool.evaluate(prompts, greedy, 1)
    values = {"eval/rows": float(len(prompts))}
    correct = [flags for row in rows if (flags := _correct(row, config))]
    values["eval/failed"] = float(len(prompts) - len(correct))
    records = {(row.epoch, row.row): _record(row, config) for row in rows}
    if correct:
        values["eval/greedy_accuracy"] = sum(sum(flags) / len(flags) for flags in correct) / len(correct)
    if settings.samples:
        sampled = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=stops,
            stop_strings=strings,
            logprobs=False,
        )
        rows = await pool.evaluate(prompts, sampled, settings.samples)
        for row in rows:
            if (record := records.get((row.epoch, row.row))) is not None:
                record["sampled"] = _flags(row, config)
        correct = [flags for row in rows if (flags := _correct(row, config))]
        if correct:
            values["eval/sampled_accuracy"] = sum(sum(flags) / len(flags) for flags in correct) / len(correct)
            if settings.samples > 1:
                values["eval/pass_at_k"] = sum(any(flags) for flags in correct) / len(correct)
    return EvalReport(values | _means(rows), list(records.values()))


def accuracy_reward(config: Config) -> RewardConfig:
    """The reward that says whether a completion is correct: the first with a positive weight."""
    return next((reward for reward in config.reward if reward.weight > 0), config.reward[0])


def correct_from(reward: RewardConfig) -> float:
    """The least value that counts as correct: the top of the reward's range, less rounding; 1 where it declares none."""
    low, high = declared_range(reward) or (0.0, 1.0)
    return high - range_slack(low, high)


def _correct(row: EvalRow, config: Config) -> list[bool]:
    return [flag for flag in _flags(row, config) if flag is not None]


def _flags(row: EvalRow, config: Config) -> list[bool | None]:
    reward = accuracy_reward(config)
    least = correct_from(reward)
    parts = [sample.parts.get(reward.key) for sample in row.samples]
    return [None if part is None else part >= least for part in parts]


def _record(row: EvalRow, config: Config) -> dict[str, Any]:
    flags = _flags(row, config)
    return {
        "version": row.version,
        "row": row.row,
        "greedy": flags[0] if flags else None,
        "tokens": row.samples[0].tokens if row.samples else None,
    }


def _means(rows: Sequence[EvalRow]) -> dict[str, float]:
    samples = [sample for row in rows for sample in row.samples]
    values: dict[str, float] = {}
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        values["eval/reward"] = sum(rewards) / len(rewards)
    for name in sorted({name for sample in samples for name in sample.parts}):
        parts = [part for sample in samples if (part := sample.parts.get(name)) is not None]
        if parts:
            values[f"eval/rewards/{name}/mean"] = sum(parts) / len(parts)
    if samples:
        values["eval/mean_length"] = sum(sample.tokens for sample in samples) / len(samples)
        values["eval/clipped_ratio"] = sum(sample.truncated for sample in samples) / len(samples)
    return values
