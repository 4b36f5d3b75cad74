"""A run as the controller would tell it: plausible numbers, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from pods_cluster.types import FinishReason, GroupId, Rollout


def told_steps(
    steps: int, *, every: int = 10, seed: int = 0, n: int = 64, m: int = 16
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, values) as handed to `Recorder.step`: an evaluation at step 0, then training and evaluations."""
    rng = random.Random(seed)
    for step in range(steps + 1):
        skill = 0.42 + 0.48 * (1 - math.exp(-3.2 * step / max(steps, 1)))
        if step:
            yield step, training(step, skill, rng, n, m)
        if step % every == 0 or step == steps:
            greedy = min(max(skill + rng.gauss(0, 0.012), 0), 1)
            yield (
                step,
                {
                    "eval/greedy_accuracy": greedy,
                    "eval/sampled_accuracy": min(max(greedy - 0.06 + rng.gauss(0, 0.012), 0), 1),
                    "eval/reward": greedy - 0.03,
                    "eval/rows": 256,
                    "eval/version": step,
                    "timing_s/eval": 1.4 + 0.1 * rng.random(),
                },
            )


def training(step: int, skill: float, rng: random.Random, n: int = 64, m: int = 16) -> dict[str, Any]:
    groups = 8
    silent = sum(rng.random() < 0.5 * abs(2 * skill - 1) ** 3 for _ in range(groups))
    generate, update = 1.9 + 0.3 * rng.random(), 0.9 + 0.15 * rng.random()
    reward = min(max(skill + rng.gauss(0, 0.04), 0), 1)
    length = 11 + 2 * rng.random()
    return {
        "updates": 1,
        "reward": reward,
        "reward/kept": 0.5 + 0.3 * (reward - 0.5),
        "reward_std": 0.35,
        "reward_std/kept": 0.5,
        "frac_reward_zero_std": silent / (groups + silent),
        "rewards/arithmetic/mean": reward,
        "completions/mean_length": length,
        "completions/kept_mean_length": length * 0.98,
        "completions/clipped_ratio": 0.02,
        "rollouts/generated": (groups + silent) * n,
        "rollouts/scored": (groups + silent) * n - 1,
        "rollouts/selected": groups * m,
        "rollouts/trained": groups * m,
        "tokens/sampled": int((groups + silent) * n * length),
        "tokens/trained": int(groups * m * length),
        "groups/trained": groups,
        "groups/no_signal": silent,
        "groups/stale": 0,
        "rollouts/excluded": 1,
        "timing_s/generate": generate,
        "timing_s/score": 0.09,
        "timing_s/select": 0.01,
        "timing_s/fetch": 0.03,
        "timing_s/update": update,
        "timing_s/publish": 0.12,
        "timing_s/step": generate + update + 0.3,
        "generator/idle_share": 0.35 + 0.05 * rng.random(),
        "learner/idle_share": 0.69 + 0.05 * rng.random(),
        "generator/workers": 1,
        "learner/workers": 2,
        "weights/version": step,
        "weights/bytes": 4_812_800,
        "weights/sync_seconds": 0.118,
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.6 + 0.2 * rng.random(),
        "learning_rate": 3e-4,
        "sampling/sampling_logp_difference/mean": 3e-7,
    }


def rollouts(group: GroupId, count: int = 4, text: str = "") -> list[Rollout]:
    return [
        Rollout(
            group=group,
            index=index,
            prompt_ids=(1, 2, 3),
            token_ids=[4, 5, index],
            logprobs=None,
            finish_reason=FinishReason.STOP,
            first_version=3,
            last_version=3,
            text=text or f"17+25 = {40 + index}",
            reward=float(index == 2),
            reward_parts={"arithmetic": float(index == 2), "format": None},
        )
        for index in range(count)
    ]
