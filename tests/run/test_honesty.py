"""The quickstart learns from its rewards and from nothing else: deal them to other rollouts, and the gain is gone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pods_cluster.client.demo import CONFIG
from pods_cluster.quickstart.warm_start import WarmStart, prepare
from tests.client.command import on_cluster, pods

STEPS = 25
RIGHT = "eval/rewards/exact_match/mean"


def start(cache: Path, runs: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    made = prepare(cache, WarmStart())
    places = [
        f"model.path={made.model}",
        f"data.path={made.data / 'train.jsonl'}",
        f"data.eval.path={made.data / 'test.jsonl'}",
        f"run.dir={runs}",
        f"run.name={name}",
        f"run.eval.every={STEPS}",
        f"run.steps={STEPS}",
        "run.checkpoint.every=0",
        "learner.schedule=constant",
    ]
    return subprocess.Popen(
        pods("train", "--plain", str(CONFIG), *places, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=on_cluster(),
    )


def accuracies(process: subprocess.Popen[str], folder: Path) -> list[float]:
    """Share of sampled answers to held-out sums that are right, before the first step and after the last."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[RIGHT] for row in rows if RIGHT in row]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_shuffled_rewards_the_gain_vanishes(cluster: None, tmp_path: Path):
    # the true reward has no weight in the second run: it only measures
    reward = f"reward=[{{name: '{Path(__file__).parent / 'shuffled.py'}:shuffled'}}, {{name: exact_match, weight: 0}}]"
    runs = tmp_path / "runs"
    # beside each other: a pool waits while the other works, so that two runs fit on two cores
    own, dealt = start(tmp_path, runs, "own"), start(tmp_path, runs, "dealt", reward)
    try:
        before, after = accuracies(own, runs / "own")
        same, without = accuracies(dealt, runs / "dealt")
    finally:
        own.kill()
        dealt.kill()
    assert before == same < 0.5
    assert after > before + 0.06
    assert without < before
