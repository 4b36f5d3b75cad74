"""`pods sweep` and `pods compare` as their user types them: runs are interrupted, gone on with, skipped and compared."""

from __future__ import annotations

import csv
import io
import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pods_cluster.client.cli import app
from pods_cluster.client.demo import CONFIG
from pods_cluster.client.paths import absolute
from pods_cluster.client.sweep import Runner, prepare, runs_at_once, write_sweep_file
from pods_cluster.config import Config, ConfigError, dump_config
from pods_cluster.config.sweep import Sweep, load_sweep
from pods_cluster.run.live_file import living_process, write_live_file
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from tests.client.command import environment, on_cluster, pods, run
from tests.docs.pages import ROOT
from tests.tiny_run import Made

SHORT = {
    "run.steps": 3,
    "run.eval.every": 1,
    "run.checkpoint.every": 1,
    "run.export": False,
    "learner.prompts_per_step": 4,
    "learner.warmup_steps": 0,
    "selector.no_signal": "keep",
    "selector.keep": 8,
    "generator.engine": "paced",
    "generator.engine_options": {
        "tokens_per_second": 300,
        "shortest": 2,
        "longest": 6,
        "accuracy": 0.5,
        "reward_token": 5,
    },
}


def sweep_file(folder: Path, made: Made, **fields: object) -> Path:
    overrides = dict(part.split("=", 1) for part in made.overrides(folder / "runs"))
    path = folder / "sweep.yaml"
    content = {"base": str(CONFIG), "name": "tiny", "overrides": {**overrides, **SHORT}, **fields}
    path.write_text(yaml.safe_dump(content))
    return path


def begun(config: Config) -> RunFolder:
    """The folder of a run as its controller makes it."""
    return RunFolder.create(Path(config.run.dir).absolute(), config.run.name, dump_config(absolute(config)))


@pytest.fixture
def loaded(made: Made, tmp_path: Path) -> Sweep:
    return load_sweep(sweep_file(tmp_path, made, seeds=2, three_arms={"n": 8, "m": 4}))


def test_what_was_begun_otherwise_or_is_alive_is_refused_before_anything_starts(loaded: Sweep) -> None:
    assert [job.state for job in prepare(loaded)] == ["waiting"] * 6
    first, second, third = (run.config for run in loaded.runs[:3])
    begun(first.model_copy(update={"staleness": 1}))
    write_live_file(begun(second), "10.0.0.1:6379")
    (Path(third.run.dir) / third.run.name).mkdir()
    (Path(third.run.dir) / third.run.name / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError) as error:
        prepare(loaded)
    text = str(error.value)
    assert "3 problems" in text
    assert "tiny-grpo-s0: was begun with staleness: 1, now 0; give the sweep another name" in text
    assert "tiny-grpo-ga-s0: is alive (process" in text
    assert "tiny-grpo-pods-s0: holds files that are no run" in text


def test_a_rule_that_is_not_there_is_told_for_its_arm(made: Made, tmp_path: Path) -> None:
    path = sweep_file(tmp_path, made, arms={"a": {"selector.rule": "max_varianse"}, "b": {}})
    with pytest.raises(ConfigError, match=r"arm a: selector\.rule: 'max_varianse' is not a known rule; did you mean"):
        prepare(load_sweep(path))


def test_longer_runs_may_be_gone_on_with_and_those_of_an_earlier_version(loaded: Sweep, tmp_path: Path) -> None:
    folder = begun(loaded.runs[0].config)
    tree = yaml.safe_load(folder.config.read_text())
    del tree["reward"][0]["batch"], tree["scoring"]  # fields that came later, at their defaults
    folder.config.write_text(yaml.safe_dump(tree))
    longer = load_sweep(tmp_path / "sweep.yaml", ["run.steps=9"])
    assert prepare(longer)[0].state == "waiting"


def test_auto_counts_what_the_cluster_holds(loaded: Sweep) -> None:
    auto = Sweep(loaded.config.model_copy(update={"parallel": "auto"}), loaded.runs)
    assert runs_at_once(auto, {"CPU": 64.0}, cores=9) == 4  # a generator and a rank each
    assert runs_at_once(loaded, {"CPU": 1.0}, cores=1) == 1
    jobs = prepare(auto)
    runner = Runner(jobs, 3, {"CPU": 5.0}, {})
    for job in jobs[:2]:
        assert runner._fits(job.run.config)
        job.state = "running"
    assert not runner._fits(jobs[2].run.config)  # 3 x 2 CPUs


def recorded(loaded: Sweep, rise: float = 0.2) -> Path:
    """Run folders of the sweep with made-up curves: GRPO-GA takes 60 s a step and gains `rise` in it, the others 30 s and 0.2."""
    for one in loaded.runs:
        seconds = 60.0 if one.arm == "grpo-ga" else 30.0
        with Recorder.for_run(begun(one.config)) as recorder:
            for step in range(4):
                gain = rise if one.arm == "grpo-ga" else 0.2
                values = {"eval/greedy_accuracy": gain * step + 0.01 * one.seed, "eval/rows": 100.0}
                recorder.step(step, values | ({"timing_s/step": seconds, "reward": 0.5} if step else {}))
    return write_sweep_file(loaded).parent


def test_a_sweeps_folder_is_compared_as_its_file_says(loaded: Sweep) -> None:
    folder = recorded(loaded)
    result = CliRunner().invoke(app, ["compare", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["baseline"] == "grpo-ga"
    (arm,) = (arm for arm in found["arms"] if arm["label"] == "grpo-pods")
    assert arm["seeds"] == [0, 1]
    ratio = arm["axes"]["training-minutes"]["ratio"]
    assert ratio["value"] == pytest.approx(2.0)
    assert ratio["target"] == pytest.approx(0.99 * 0.605)
    assert arm["axes"]["steps"]["ratio"]["value"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("baseline", "other", "told", "column", "bound"),
    [
        ("grpo-ga", "grpo-pods", "> 2.42", "speed_up_at_least", 3 / 1.2375),
        ("grpo-pods", "grpo-ga", "< 0.41", "speed_up_at_most", 1.2375 / 3),
    ],
    ids=["the baseline never", "the arm never"],
)
def test_what_one_alone_reaches_bounds_the_speed_up(
    loaded: Sweep, baseline: str, other: str, told: str, column: str, bound: float
) -> None:
    """GRPO-GA ends after 3 minutes at 0.305; the others reach 0.5 after 2.475 steps of half a minute."""
    command = ["compare", str(recorded(loaded, rise=0.1)), "--target", "0.5", "--baseline", baseline]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "250"}).output
    (line,) = (line for line in shown.splitlines() if f" {other} " in line and "training-minutes" in line)
    assert told in line
    assert "inf" not in shown
    row = next(
        row
        for row in csv.DictReader(io.StringIO(CliRunner().invoke(app, [*command, "--csv"]).stdout))
        if (row["arm"], row["axis"]) == (other, "training-minutes")
    )
    assert float(row[column]) == pytest.approx(bound)


def test_tables_lines_and_figures(loaded: Sweep, tmp_path: Path) -> None:
    folder = recorded(loaded)
    shown = CliRunner().invoke(app, ["compare", str(folder)], env={"COLUMNS": "250"})
    assert "times sooner than grpo-ga" in shown.output
    assert "2 seeds: a bootstrap over so few is too narrow" in shown.output
    lines = CliRunner().invoke(
        app, ["compare", str(folder), "--csv", "--target", "0.4", "--out", str(tmp_path / "out")]
    )
    rows = list(csv.DictReader(io.StringIO(lines.stdout)))
    sooner = {(row["arm"], row["axis"]): row["speed_up"] for row in rows}
    assert float(sooner["grpo", "training-minutes"]) == pytest.approx(2.0)
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    wrong = CliRunner().invoke(app, ["compare", str(folder), "--baseline", "ppo"])
    assert "baseline: 'ppo' is none of the arms" in str(wrong.exception)


def test_a_sweep_that_has_not_begun_cannot_be_compared(loaded: Sweep) -> None:
    folder = write_sweep_file(loaded).parent
    result = CliRunner().invoke(app, ["compare", str(folder)])
    assert "no run of it has a step yet" in str(result.exception)


def test_a_dry_run_starts_nothing(made: Made, tmp_path: Path) -> None:
    path = sweep_file(tmp_path, made, three_arms={"n": 8, "m": 4})
    result = CliRunner().invoke(app, ["sweep", str(path), "--dry-run", "selector.no_signal=replace"])
    assert result.exit_code == 0, result.output
    assert result.output.count("waiting") == 3
    assert "selector.no_signal: replace lets arms see different prompts" in result.output.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


def test_what_is_not_done_is_gone_on_with_by_the_command_that_is_told(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The told command has all that was typed: without the overrides the begun runs would be refused."""
    monkeypatch.setattr("pods_cluster.client.sweep_command._run", lambda *_, **__: None)  # as if stopped at once
    path = sweep_file(tmp_path, made, three_arms={"n": 8, "m": 4}, seeds=3)
    typed = [
        "sweep",
        str(path),
        "--arms",
        "grpo,grpo-pods",
        "--seeds",
        "2",
        "--parallel",
        "1",
        "--no-isolate",
        "--plain",
    ]
    typed += ["run.max_seconds=7", "model.path=/a folder/model"]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 130, result.output
    told = result.output.splitlines()[-1]
    assert told.startswith("0 runs failed, 4 not done; go on with it: ")
    assert shlex.split(told.partition("go on with it: ")[2]) == ["pods", *typed]


def swept_until(path: Path, folder: RunFolder, sent: signal.Signals, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a sweep that gets this signal once the run in `folder` has made a step."""
    command = pods("sweep", str(path), "--plain")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if folder.metrics.is_file() and any(record["step"] >= 1 for record in folder.read_metrics()):
                break
            time.sleep(0.05)
        process.send_signal(sent)
        output, _ = process.communicate(timeout=240)
    return process.returncode, output


@pytest.mark.slow  # two runs, each gone on with once
def test_a_sweep_is_killed_and_interrupted_gone_on_with_and_compared(cluster: None, made: Made, tmp_path: Path) -> None:
    example = yaml.safe_load((ROOT / "examples" / "sweep.yaml").read_text())  # on another base, smaller
    assert example.pop("base") == "lora.yaml"
    path = sweep_file(tmp_path, made, **example | {"name": "tiny", "seeds": 1})
    folder = tmp_path / "runs" / "tiny"
    first, second = (RunFolder(folder / f"tiny-{arm}-s0") for arm in ("grpo", "pods"))

    code, output = swept_until(path, first, signal.SIGKILL, environment())  # with a Ray cluster of its own
    assert code == -signal.SIGKILL, output
    deadline = time.monotonic() + 120
    while living_process(first):  # the run ends by itself, as its sweep is gone
        assert time.monotonic() < deadline, "the run of a killed sweep is still alive"
        time.sleep(0.05)
    assert not second.path.exists()

    code, output = swept_until(path, second, signal.SIGINT, on_cluster())
    assert code == 130, output
    assert "2 runs, 0 done before, 1 at a time" in output
    assert "tiny-grpo-s0: finished" in output
    assert "tiny-pods-s0: stopped" in output
    assert output.endswith(f"0 runs failed, 1 not done; go on with it: pods sweep {path} --plain\n")
    written = first.metrics.read_bytes()

    again = run("sweep", str(path), "--plain", env=on_cluster())
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 runs, 1 done before, 1 at a time" in again.stdout
    assert first.metrics.read_bytes() == written  # not run again
    assert "times sooner than grpo" in again.stdout
    for arm, made_a_step in ((first, 4 * 8), (second, 4 * 16)):
        assert any(event["kind"] == "resumed" for event in arm.read_events())
        trained = [record for record in arm.read_metrics() if record.get("updates")]
        assert [record["rollouts/generated"] for record in trained] == [made_a_step] * 3
        assert [record["rollouts/trained"] for record in trained] == [4 * 8] * 3
