"""Runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pods_cluster.config import dump_config, load_config
from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.dashboard.comparison import differences
from pods_cluster.telemetry.arm_comparison import averaged, compare
from pods_cluster.telemetry.curves import RunSeries, arms
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.speedup import Target
from tests.dashboard.conftest import SECRET, connect
from tests.dashboard.made import CONFIG, append, step_line


def run_with(root: Path, name: str, *settings: str) -> RunFolder:
    source = root / "source.yaml"
    source.write_text(CONFIG)
    text = dump_config(load_config(source, [f"run.name={name}", f"run.dir={root}", *settings]))
    return RunFolder.create(root, name, text)


def test_settings_that_differ_are_named_and_others_are_not(tmp_path: Path) -> None:
    run_with(tmp_path, "pods")
    run_with(tmp_path, "grpo", "generator.rollouts_per_prompt=16", "run.seed=3")
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        found = client.get("/api/compare", params={"run": ["pods", "grpo"]}).json()
    assert [figures["run"] for figures in found["figures"]] == ["pods", "grpo"]
    assert {item["name"]: item["values"] for item in found["settings"]} == {
        "generator.rollouts_per_prompt": [64, 16],
        "run.seed": [0, 3],
    }


def test_final_and_best_figures_and_what_they_cost(tmp_path: Path) -> None:
    folder = run_with(tmp_path, "run", "generator.gpus_per_worker=1", "learner.gpus_per_worker=2")
    counts = {"rollouts/scored": 64.0, "rollouts/trained": 16.0, "tokens/sampled": 1000.0}
    for step in range(1, 31):
        values = {
            "reward": 1.0 if step <= 12 else step / 100,
            "generator/workers": 2.0,
            "learner/workers": 1.0,
            **counts,
        }
        if step % 10 == 0:
            values["eval/greedy_accuracy"] = {10: 0.5, 20: 0.75, 30: 0.625}[step]
        append(folder.metrics, step_line(step, **values))
    run_with(tmp_path, "empty")
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        full, empty = client.get("/api/compare", params={"run": ["run", "empty"]}).json()["figures"]
    assert (full["accuracy_final"], full["accuracy_best"], full["accuracy_best_step"]) == (0.625, 0.75, 20)
    assert full["reward_final"] == pytest.approx(sum(range(21, 31)) / 1000)
    assert full["reward_best"] == 1.0
    assert full["seconds"] == 30.0
    assert full["gpu_seconds"] == pytest.approx(30 * (2 * 1 + 1 * 2))
    assert (full["rollouts_scored"], full["rollouts_trained"], full["tokens_sampled"]) == (1920, 480, 30_000)
    assert [value for name, value in empty.items() if name not in ("run", "status")] == [None] * (len(empty) - 2)


def test_gpu_seconds_follow_the_sizes_of_the_pools(tmp_path: Path) -> None:
    """As `pods figure` counts them over every step, also where sizes change, come back, or are not told."""
    folder = run_with(
        tmp_path, "run", "generator.gpus_per_worker=0.5", "learner.gpus_per_worker=1", "learner.workers=2"
    )
    append(folder.metrics, step_line(0, **{"eval/greedy_accuracy": 0.5}))
    for step in range(1, 40):
        sizes = {} if step < 5 else {"generator/workers": 1.0 + (step // 10) % 2, "learner/workers": 1.0 + (step > 30)}
        append(folder.metrics, step_line(step, **sizes))
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        found = client.get("/api/compare", params={"run": "run"}).json()["figures"][0]["gpu_seconds"]
        config = client.get("/api/runs/run/config").json()["config"]
    spent, _ = RunSeries.of("run", folder.read_metrics(), config).points("elapsed", "gpu-seconds")
    assert found == pytest.approx(spent[-1])


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run_with(tmp_path, "run")
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        assert client.get("/api/compare", params={"run": ["run", "nope"]}).status_code == 404
        assert client.get("/api/compare").status_code == 422


def test_arms_are_runs_that_differ_in_their_seed_and_a_speed_up_is_that_of_the_command(tmp_path: Path) -> None:
    folders = {}
    for name, seconds, *settings in (
        ("grpo-0", 60.0, "run.seed=0"),
        ("grpo-1", 60.0, "run.seed=1"),
        ("pods-0", 30.0, "run.seed=0", "selector.keep=8"),
        ("pods-1", 30.0, "run.seed=1", "selector.keep=8"),
    ):
        folders[name] = run_with(tmp_path, name, *settings)
        append(folders[name].metrics, step_line(0, **{"eval/greedy_accuracy": 0.1, "eval/rows": 100.0}))
        for step in range(1, 21):
            values = {"timing_s/step": seconds, "rollouts/generated": 64.0, "generator/workers": 1.0 + (step > 7)}
            values["reward"] = step / 20 + 0.3 * (-1) ** step
            if step % 5 == 0:
                values |= {"eval/greedy_accuracy": 0.1 + 0.04 * step + 0.001 * int(name[-1]), "eval/rows": 100.0}
            append(folders[name].metrics, step_line(step, **values))
    query = {"run": list(folders), "x": "training-minutes", "baseline": "grpo-1"}
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        found = client.get("/api/compare", params=query).json()["arms"]
        alone = client.get("/api/compare", params={"run": "grpo-0"}).json()["arms"]
        wrong = client.get("/api/compare", params=query | {"x": "hours"})
        unknown = client.get("/api/compare", params=query | {"y": "loss"})
        rewards = client.get("/api/compare", params=query | {"y": "reward", "target": 0.5}).json()["arms"]
    assert alone is None
    assert wrong.status_code == unknown.status_code == 422
    assert found["baseline"] == "grpo-0"
    assert [(each["label"], each["runs"]) for each in found["curves"]] == [
        ("grpo-0", ["grpo-0", "grpo-1"]),
        ("pods-0", ["pods-0", "pods-1"]),
    ]
    assert found["curves"][1]["x"] == [0.0, 2.5, 5.0, 7.5, 10.0]
    assert found["curves"][1]["y"] == pytest.approx([0.1, 0.3005, 0.5005, 0.7005, 0.9005])
    series = {name: RunSeries.of(name, folder.read_metrics(), read_config(folder)) for name, folder in folders.items()}
    wanted = compare(arms(list(series.values())), baseline="grpo-0")
    by_axis = {each["axis"]: each for each in found["speed_ups"]}
    assert set(by_axis) == set(wanted.arms[1].axes)
    for axis, against in wanted.arms[1].axes.items():
        assert by_axis[axis]["value"] == pytest.approx(against.ratio.value)
        assert by_axis[axis]["low"] == pytest.approx(against.ratio.low)
    assert by_axis["training-minutes"]["value"] == pytest.approx(2.0)
    assert by_axis["steps"]["value"] == pytest.approx(1.0)

    # rewards are means over ten steps: what single steps swing by is no best, and no reaching of a target
    smooth = averaged(arms(list(series.values())), "reward")
    wanted = compare(smooth, baseline="grpo-0", metric="reward", target=Target(0.5))
    assert rewards["metric"] == "reward"
    assert rewards["curves"][0]["y"] == pytest.approx([record["reward"] for record in smooth["grpo-0"][0].records[1:]])
    assert max(rewards["curves"][0]["y"]) < 0.8
    for found in rewards["speed_ups"]:
        ratio = wanted.arms[1].axes[found["axis"]].ratio
        assert (found["target"], found["value"]) == (0.5, pytest.approx(ratio.value))
        assert found["baseline_at"] == pytest.approx(ratio.baseline_at)


def read_config(folder: RunFolder) -> dict:
    return yaml.safe_load(folder.config.read_text())


def test_lists_and_missing_settings_are_compared_whole() -> None:
    one = {"reward": [{"name": "a"}], "learner": {"lora": None}, "options": {}, "run": {"name": "x", "dir": "d"}}
    two = {"reward": [{"name": "a"}, {"name": "b"}], "learner": {"lora": {"rank": 8}}, "run": {"name": "y", "dir": "e"}}
    assert {item.name: item.values for item in differences([one, two])} == {
        "reward": [[{"name": "a"}], [{"name": "a"}, {"name": "b"}]],
        "learner.lora.rank": [None, 8],
    }
    assert differences([one, one]) == []
