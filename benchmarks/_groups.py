"""Made-up groups for benchmarks of the learner, whole and selected."""

from __future__ import annotations

import numpy as np

from pods_cluster.selection.select import select
from pods_cluster.types import FinishReason, GroupId, Locator, Rollout, Selection

N, M = 64, 16
Rollouts = dict[Locator, Rollout]


def make_groups(
    groups: int,
    rng: np.random.Generator,
    *,
    vocabulary: int,
    prompt_tokens: int,
    longest: int,
    lognormal: bool = False,
) -> tuple[list[Selection], list[Selection], Rollouts]:
    """Groups of 64 with binary rewards: all, and the 16 of greatest variance.

    Lengths are spread evenly over a factor of 6 or, `lognormal`, as those of answers are: half of `longest` in the
    middle, few short ones, some cut at `longest`.
    """
    everyone: list[Selection] = []
    kept: list[Selection] = []
    rollouts: Rollouts = {}
    for row in range(groups):
        group = GroupId(0, row)
        prompt = tuple(rng.integers(0, vocabulary, prompt_tokens).tolist())
        if lognormal:
            spread = np.exp(rng.normal(np.log(longest / 2), 0.45, N))
            lengths = np.clip(spread, longest // 25, longest).astype(np.int32)
        else:
            lengths = rng.integers(longest // 6, longest + 1, N).astype(np.int32)
        rewards = (rng.random(N) < 0.5).astype(np.float64)
        locators = [Locator("benchmark/generator/0", group, index) for index in range(N)]
        for locator, length in zip(locators, lengths.tolist(), strict=True):
            rollouts[locator] = Rollout(
                group=group,
                index=locator.index,
                prompt_ids=prompt,
                token_ids=rng.integers(0, vocabulary, length).tolist(),
                logprobs=None,
                finish_reason=FinishReason.STOP,
                first_version=0,
                last_version=0,
            )
        chosen = select(rewards, M, "max_variance", 0, group)
        for index, into in ((np.arange(N), everyone), (np.sort(chosen.kept), kept)):
            into.append(
                Selection(
                    group=group,
                    locators=[locators[i] for i in index],
                    rewards=rewards[index],
                    lengths=lengths[index],
                    prompt_tokens=prompt_tokens,
                    first_versions=np.zeros(len(index), np.int32),
                    group_mean=chosen.group_mean,
                    group_std=chosen.group_std,
                    group_valid=N,
                )
            )
    return everyone, kept, rollouts
