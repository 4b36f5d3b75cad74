"""Curves for comparison: known points on each axis, seeds joined with a known interval, refusals that name the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pods_cluster.client.cli import app
from pods_cluster.client.figure_command import read_run
from pods_cluster.telemetry.comparison_figure import save_comparison
from pods_cluster.telemetry.curves import AXES, LABELS, Axis, CurveError, RunSeries, arms, curve, wilson
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from tests.telemetry.synthetic import told_steps

CONFIG: dict[str, Any] = {
    "generator": {"engine": "vllm", "workers": 2, "tensor_parallel": 1, "gpus_per_worker": None},
    "learner": {"workers": 1, "gpus_per_worker": 1.0},
    "run": {"name": "a", "seed": 0, "dir": "runs", "steps": 3},
}


def records(values: list[float], seconds: float = 30.0) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "elapsed": step * seconds,
            "timing_s/step": 0.8 * seconds if step else 0.0,
            "reward": value,
            "rollouts/generated": 100 if step else 0,
            "tokens/sampled": 1000 if step else 0,
        }
        for step, value in enumerate(values)
    ]


def series(name: str, values: list[float], seed: int = 0, seconds: float = 30.0, **changes: Any) -> RunSeries:
    config = CONFIG | {"run": CONFIG["run"] | {"seed": seed, "name": name}} | changes
    return RunSeries.of(name, records(values, seconds), config)


@pytest.mark.parametrize(
    ("axis", "wanted"),
    [
        ("steps", [0, 1, 2]),
        ("minutes", [0, 0.5, 1]),
        ("training-minutes", [0, 0.4, 0.8]),
        ("gpu-seconds", [0, 90, 180]),
        ("rollouts", [0, 100, 200]),
        ("tokens", [0, 1000, 2000]),
    ],
)
def test_points_on_each_axis(axis: Any, wanted: list[float]) -> None:
    x, y = series("a", [0.1, 0.2, 0.3]).points("reward", axis)
    assert x.tolist() == wanted
    assert y.tolist() == [0.1, 0.2, 0.3]


def test_gpu_seconds_follow_the_pools_sizes() -> None:
    run = series("a", [0.1, 0.2, 0.3])
    run.records[2]["generator/workers"] = 4
    assert run.points("reward", "gpu-seconds")[0].tolist() == [0, 90, 90 + 30 * 5]


def test_no_gpu_is_told() -> None:
    run = series("cpu", [0.1, 0.2], generator={"engine": "transformers", "workers": 1}, learner={"workers": 1})
    with pytest.raises(CurveError, match="cpu: its pools held no GPU; ask for --x minutes"):
        run.points("reward", "gpu-seconds")


def test_a_metric_that_is_not_there_is_told_with_near_ones() -> None:
    with pytest.raises(CurveError, match="a: no step has the metric 'rollouts/made'"):
        series("a", [0.1]).points("rollouts/made", "steps")


def test_runs_that_differ_in_their_seed_alone_are_one_arm() -> None:
    runs = [series("a-0", [0.1], 0), series("a-1", [0.2], 1), series("b", [0.3], 0, staleness=1)]
    assert {label: [run.name for run in members] for label, members in arms(runs).items()} == {
        "a-0": ["a-0", "a-1"],
        "b": ["b"],
    }
    named = arms(runs, ["x", "y", "x"])
    assert {label: [run.name for run in members] for label, members in named.items()} == {
        "x": ["a-0", "b"],
        "y": ["a-1"],
    }


def test_the_interval_over_three_seeds_is_students() -> None:
    found = curve("arm", [series(str(s), [0.0, 0.1 * s]) for s in (1, 2, 3)], "reward", "steps")
    assert found.runs == 3
    assert found.y.tolist() == pytest.approx([0.0, 0.2])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert found.low.tolist() == pytest.approx([0.0, 0.2 - half])
    assert found.high.tolist() == pytest.approx([0.0, 0.2 + half])


def test_seeds_of_other_paces_meet_on_a_common_grid() -> None:
    slow, fast = series("s", [0.0, 0.5, 1.0], seconds=60), series("f", [0.0, 0.5, 1.0], seconds=30)
    found = curve("arm", [slow, fast], "reward", "minutes")
    assert found.x[0] == 0
    assert found.x[-1] == 1.0
    assert found.y[-1] == pytest.approx((0.5 + 1.0) / 2)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_wilsons_interval_holds_the_share(share: float, rows: int) -> None:
    low, high = wilson(share, rows)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert wilson(share, rows * 4)[1] - wilson(share, rows * 4)[0] < high - low


def test_wilsons_published_value() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def made_run(root: Path, name: str, seed: int) -> Path:
    tree = CONFIG | {"run": CONFIG["run"] | {"name": name, "seed": seed}}
    folder = RunFolder.create(root, name, yaml.safe_dump(tree))
    with Recorder.for_run(folder) as recorder:
        for step, values in told_steps(20, seed=seed):
            recorder.step(step, values)
    return folder.path


def test_the_command_writes_three_formats(tmp_path: Path) -> None:
    runs = [made_run(tmp_path, f"r{seed}", seed) for seed in range(3)]
    arguments = [f"pods={runs[0]}", f"pods={runs[1]}", f"grpo={runs[2]}"]
    for axis in ("steps", "rollouts", "gpu-seconds"):
        result = CliRunner().invoke(app, ["figure", *arguments, "--x", axis, "--out", str(tmp_path / axis)])
        assert result.exit_code == 0, result.output
        files = {path.suffix: path.read_bytes() for path in (tmp_path / axis).iterdir()}
        assert files[".png"].startswith(b"\x89PNG")
        assert files[".pdf"].startswith(b"%PDF")
        assert b"pods (2 seeds)" in files[".svg"]
        assert b"grpo" in files[".svg"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--x", "hours"], "--x: 'hours' is no axis; choose one of steps, minutes"),
        (["--y", "rewrad"], "--y: r0: no step has the metric 'rewrad'"),
        (["--formats", "jpg"], "--formats: 'jpg' is none of png, svg, pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: list[str], text: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, "r0", 0)
    result = CliRunner().invoke(app, ["figure", str(run), *arguments])
    assert result.exception is not None
    assert text in str(result.exception)


def test_runs_are_found_by_their_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs", "r0", 0)
    result = CliRunner().invoke(app, ["figure", "mine=r0", "--formats", "png"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs" / "r0" / "figures" / "comparison.png").is_file()
    result = CliRunner().invoke(app, ["figure", "r1"])
    assert "r1: there is no such run; give a run's folder, or its name in the folder runs" in str(result.exception)


def test_a_figure_may_have_an_axis_for_each_panel(tmp_path: Path) -> None:
    _, run = read_run(str(made_run(tmp_path, "r0", 0)))
    axes: tuple[Axis, ...] = ("steps", "minutes")
    panels = [("reward", [curve("r0", [run], "reward", axis)]) for axis in axes]
    (path,) = save_comparison(panels, axes, tmp_path / "out", formats=("svg",))
    text = path.read_text()
    assert LABELS["steps"] in text
    assert LABELS["minutes"] in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["figure", str(tmp_path)])
    assert "no run's folder" in str(result.exception)


def test_axes_are_the_documented_ones() -> None:
    assert set(AXES) == {"steps", "minutes", "training-minutes", "gpu-seconds", "rollouts", "tokens"}
    assert np.isfinite([wilson(0.0, 0)[0], wilson(1.0, 0)[1]]).all()


def test_a_metric_of_single_steps_is_averaged_over_the_last_of_them() -> None:
    run = RunSeries.of("run", [*records([1.0, 0.0, 5.0, 3.0]), {"step": 9, "elapsed": 300.0}], CONFIG)
    smooth = run.averaged("reward", 2)
    assert smooth.points("reward", "steps")[1].tolist() == [1.0, 0.5, 2.5, 4.0]
    assert smooth.points("reward", "minutes")[0].tolist() == run.points("reward", "minutes")[0].tolist()
    assert run.points("reward", "steps")[1].tolist() == [1.0, 0.0, 5.0, 3.0]
    assert (smooth.name, smooth.seed, len(smooth.records)) == ("run", 0, 5)
