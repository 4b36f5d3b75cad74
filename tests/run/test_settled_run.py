"""A whole run on real processes that aborts settled groups while the learner trains: nothing is lost, all is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.client.demo import CONFIG
from pods_cluster.client.driver import train
from pods_cluster.config import load_config
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.types import Fate
from tests.tiny_run import Made

STEPS, PROMPTS, N, M = 4, 4, 16, 4


@pytest.mark.slow  # a whole run
def test_settled_groups_are_aborted_in_a_run_with_overlap(cluster: None, made: Made, tmp_path: Path) -> None:
    config = load_config(
        CONFIG,
        [
            *made.overrides(tmp_path),
            "run.name=settled",
            f"run.steps={STEPS}",
            "learner.warmup_steps=0",
            "run.eval.every=0",
            "run.checkpoint.every=0",
            "run.samples_every=0",
            "run.export=false",
            f"reward.0.name={Path(__file__).parent / 'rewards.py'}:starts_with_one",
            "reward.0.range=[0, 1]",
            "generator.engine=paced",
            "generator.workers=2",
            "generator.cpus_per_worker=0.5",
            f"generator.rollouts_per_prompt={N}",
            "generator.max_tokens=12",
            "generator.max_sequences=16",
            "generator.engine_options={tokens_per_second: 300, shortest: 2, longest: 12, accuracy: 0.5, reward_token: 5}",
            "selector.settle=abort",
            f"selector.keep={M}",
            "selector.no_signal=replace",
            f"learner.prompts_per_step={PROMPTS}",
            "learner.cpus_per_worker=0.5",
            "staleness=1",
            "weights.relay=node",
            "cluster.address=local",
        ],
    )
    summary = train(config, live=False)
    records = [record for record in RunFolder.open(tmp_path / "settled").read_metrics() if record["step"]]
    assert len(records) == STEPS
    assert summary.rollouts["trained"] == STEPS * PROMPTS * M
    assert summary.fates[Fate.TRAINED.value] == STEPS * PROMPTS
    assert summary.fates[Fate.LOST.value] == 0
    assert summary.settled > 0
    assert summary.rollouts["aborted"] > 0
    assert summary.tokens["saved"] > 0
    assert all(record["reward_std/kept"] > 0.5 for record in records)  # two right and two wrong ones of each group
    assert max(record["staleness/max"] for record in records) <= 1
    for record in records:
        groups = record["groups/trained"] + record["groups/no_signal"]
        assert record["rollouts/generated"] + record["rollouts/aborted"] == groups * N
        assert record["tokens/sampled"] >= record["tokens/aborted"] + record["tokens/trained"]
        assert record["timing_s/wait"] >= 0
