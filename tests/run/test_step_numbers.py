"""The numbers of a step are those of its rollouts, however these lie in groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.run.step_numbers import Tally
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.telemetry.catalog import registry
from pods_cluster.types import GroupId
from tests.selection.policies import policy
from tests.selection.shards import shard

rewards = st.sampled_from([0.0, 0.25, 1.0, -3.0, math.nan])
rollouts = st.tuples(rewards, rewards, st.integers(1, 50), st.sampled_from(["end", "length", "abort"]))
groups = st.lists(st.lists(rollouts, min_size=1, max_size=6), min_size=1, max_size=5)


def tally_of(sampled: list[list[tuple[float, float, int, str]]]) -> Tally:
    core = SelectorCore(policy(no_signal="keep"))
    for row, group in enumerate(sampled):
        core.expect(GroupId(0, row), len(group))
        reward, part, lengths, ends = zip(*group, strict=True)
        aborted = [end == "abort" for end in ends]
        core.add(
            shard(
                GroupId(0, row),
                [math.nan if gone else value for gone, value in zip(aborted, reward, strict=True)],
                lengths=lengths,
                truncated=[end == "length" for end in ends],
                aborted=aborted,
                parts={"part": [math.nan if gone else value for gone, value in zip(aborted, part, strict=True)]},
            )
        )
    tally, decision = Tally(), core.collect(len(sampled), 0, 0)
    tally.selected(decision.selections, decision.stats)
    for ended in decision.fates:
        tally.ended(ended.fate, ended.stats)
    return tally


@given(groups)
def test_means_and_extremes_are_over_the_rollouts_of_all_groups(sampled: list[list[tuple[float, float, int, str]]]):
    values = tally_of(sampled).values(0)
    registry.check(values)
    whole = [rollout for group in sampled for rollout in group if rollout[3] != "abort"]
    terminated = [length for _, _, length, end in whole if end == "end"]
    expected: dict[str, float] = {}
    if scored := [reward for reward, *_ in whole if math.isfinite(reward)]:
        expected |= {"reward": np.mean(scored), "reward/min": min(scored), "reward/max": max(scored)}
    if parts := [part for _, part, *_ in whole if math.isfinite(part)]:
        expected |= {
            "rewards/part/mean": np.mean(parts),
            "rewards/part/std": np.std(parts, ddof=1) if len(parts) > 1 else 0.0,
        }
    for kind, lengths in (("", [length for _, _, length, _ in whole]), ("_terminated", terminated)):
        if lengths:
            expected |= {
                f"completions/mean{kind}_length": np.mean(lengths),
                f"completions/min{kind}_length": min(lengths),
                f"completions/max{kind}_length": max(lengths),
            }
    others = ("reward_std", "reward/kept", "rewards/part/kept_mean")
    told = {
        name: value
        for name, value in values.items()
        if name.startswith(("reward", "completions/m")) and not name.startswith(others)
    }
    assert told == pytest.approx(expected, abs=1e-12)
