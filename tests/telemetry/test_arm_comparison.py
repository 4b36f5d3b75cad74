"""Arms beside a baseline on every axis: known numbers, what is left out and told, what JSON and CSV hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pods_cluster.telemetry.arm_comparison import ACCURACY, compare
from pods_cluster.telemetry.curves import CurveError, RunSeries
from pods_cluster.telemetry.settings import describe_changes, differing, flat
from pods_cluster.telemetry.speedup import Target


def run(name: str, accuracies: list[float], *, seed: int, seconds: float = 60.0, gpus: float = 0.0) -> RunSeries:
    """Evaluated at each step; a step takes `seconds`, and an evaluation ten more."""
    records: list[dict[str, Any]] = [
        {
            "step": step,
            "elapsed": 10 + step * (seconds + 10),
            ACCURACY: accuracy,
            "eval/rows": 100,
            **(
                {"timing_s/step": seconds, "rollouts/generated": 64, "tokens/sampled": 640, "reward": accuracy}
                if step
                else {}
            ),
        }
        for step, accuracy in enumerate(accuracies)
    ]
    config = {
        "generator": {"engine": "transformers", "workers": 1, "gpus_per_worker": gpus},
        "learner": {"workers": 1, "gpus_per_worker": gpus},
        "run": {"seed": seed, "name": name},
    }
    return RunSeries.of(name, records, config)


def arms(gpus: float = 0.0) -> dict[str, list[RunSeries]]:
    return {
        "grpo": [run(f"g{seed}", [0.2, 0.4, 0.6, 0.8], seed=seed, gpus=gpus) for seed in (0, 1)],
        "pods": [run(f"p{seed}", [0.2, 0.5, 0.8, 0.8], seed=seed, seconds=30, gpus=gpus) for seed in (0, 1)],
    }


def test_times_sooner_on_each_axis() -> None:
    found = compare(arms(), baseline="grpo", target=Target(0.8))
    grpo, pods = found.arms
    sooner = {axis: against.ratio.value for axis, against in pods.axes.items()}
    assert sooner == {
        "training-minutes": pytest.approx(3.0 / 1.0),
        "minutes": pytest.approx((10 + 3 * 70) / (10 + 2 * 40)),
        "steps": pytest.approx(1.5),
        "rollouts": pytest.approx(1.5),
        "tokens": pytest.approx(1.5),
    }
    assert all(against.ratio.value == pytest.approx(1.0) for against in grpo.axes.values())
    assert (pods.first, pods.final, pods.best, pods.steps) == pytest.approx((0.2, 0.8, 0.8, 3))
    assert pods.minutes == pytest.approx((10 + 3 * 40) / 60)
    assert "its pools held no GPU" in found.left_out["gpu-seconds"]
    gap = pods.axes["steps"].difference
    assert gap is not None
    assert (gap.at, gap.value) == (3.0, pytest.approx(0.0))


def test_the_end_of_runs_of_different_lengths_is_that_of_each() -> None:
    """Runs that end by the clock: the slower one's last step is not the faster one's end."""
    both = {"a": [run("a0", [0.2, 0.3], seed=0), run("a1", [0.2, 0.3, 0.4, 0.7], seed=1)]}
    (found,) = compare(both, target=Target(0.25)).arms
    assert (found.steps, found.final) == (1, pytest.approx(0.5))
    half = 12.706 * 0.2
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


def test_cards_that_were_held_are_counted() -> None:
    against = compare(arms(gpus=1.0), target=Target(0.8)).arms[1].axes["gpu-seconds"]
    assert against.ratio.arm_at == pytest.approx(2 * (10 + 2 * 40))


def test_json_and_rows_hold_plain_numbers() -> None:
    found = compare(arms(), baseline="pods", target=Target(0.9))  # nobody gets there
    text = json.dumps(found.as_dict(), allow_nan=False)
    assert json.loads(text)["arms"][0]["axes"]["steps"]["ratio"]["value"] is None
    rows = list(found.rows())
    assert {row["axis"] for row in rows} == {"training-minutes", "minutes", "steps", "rollouts", "tokens"}
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0]["target"] == 0.9


def test_what_cannot_be_compared_is_told() -> None:
    with pytest.raises(CurveError, match="baseline: 'ppo' is none of the arms grpo, pods"):
        compare(arms(), baseline="ppo")
    twice = {"a": [run("x", [0.1, 0.2], seed=0), run("y", [0.1, 0.2], seed=0)]}
    assert "y has the seed 0 of another run of this arm" in compare(twice).left_out["steps"]
    with pytest.raises(CurveError, match="no step has the metric 'loss'"):
        compare(arms(), metric="loss")


def test_settings_by_path_and_those_that_differ() -> None:
    one = {"run": {"name": "a", "seed": 1}, "reward": [{"name": "x"}]}
    assert flat(one) == {"run.name": "a", "run.seed": 1, "reward": [{"name": "x"}]}
    assert differing([one, {"run": {"name": "b", "seed": 2}, "reward": [{"name": "x"}]}]) == {"run.seed": [1, 2]}


def test_changes_are_told_with_both_values() -> None:
    before = {"run": {"steps": 10, "name": "a"}, "learner": {"lora": None}}
    now = {"run": {"steps": 20, "name": "a"}, "learner": {"lora": {"rank": 8}}}
    assert describe_changes(before, before) == ""
    assert describe_changes(before, now) == "run.steps: 10 → 20; learner.lora.rank: null → 8"
