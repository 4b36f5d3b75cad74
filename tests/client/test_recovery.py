"""A run outlives each of its parts, and comes to the very weights of one in which nothing failed. Real processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._faulted_run import Fault, FaultedRun
from benchmarks.soak import KILLS, soak
from pods_cluster.client import driver
from pods_cluster.client.demo import CONFIG
from pods_cluster.config import Config, load_config
from pods_cluster.run import checkpoints
from pods_cluster.run.live_file import LIVE_FILE
from pods_cluster.telemetry.run_folder import RunFolder
from tests.client.faults import Faults, send
from tests.tiny_run import Made

STEPS = 9
Measured = Callable[[str, object], None]


def config_of(made: Made, runs: Path, name: str, *overrides: str) -> Config:
    return load_config(CONFIG, [*config_settings(made, runs), f"run.name={name}", *overrides])


def config_settings(made: Made, runs: Path) -> list[str]:
    return [
        *made.overrides(runs),
        f"reward.0.name={Path(__file__).with_name('graded.py')}:score",
        "reward.0.range=[0, 1]",
        f"run.steps={STEPS}",
        "generator.rollouts_per_prompt=8",
        "generator.max_tokens=6",
        "selector.keep=4",
        "learner.prompts_per_step=4",
        "learner.learning_rate=1e-3",
        "learner.warmup_steps=1",
        "run.eval.every=0",
        "run.checkpoint.every=0",
        "run.checkpoint.copy_every=2",
        "run.samples_every=0",
        "data.eval=null",
    ]


def weights(runs: Path, name: str) -> bytes:
    return (runs / name / "model" / "model.safetensors").read_bytes()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder.open(folder).read_events() if event["kind"] == kind]


@pytest.fixture(scope="module")
def whole(cluster: None, made: Made, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run in which nothing fails."""
    runs = tmp_path_factory.mktemp("whole")
    driver.train(config_of(made, runs, "whole"), live=False)
    return weights(runs, "whole")


def test_a_run_outlives_each_of_its_parts_to_the_very_same_weights(
    whole: bytes, made: Made, tmp_path: Path, record_property: Measured
) -> None:
    faults = Faults(
        tmp_path / "broken",
        [
            (3, send("learner", signal.SIGKILL)),
            (5, send("selector", signal.SIGKILL)),
            (7, send("controller", signal.SIGKILL)),
        ],
    )
    faults.start()
    summary = driver.train(config_of(made, tmp_path, "broken"), live=False)
    for role, seconds in zip(("learner", "selector", "controller"), faults.result(), strict=True):
        record_property("measured", f"{role} killed: the second step after it came after {seconds:.1f} s")
    assert summary.status == "finished"
    folder = tmp_path / "broken"
    learner, selector, controller = events(folder, "restarting")
    assert all("died" in event["text"] for event in (learner, selector, controller))
    assert "another controller" in controller["text"]
    assert not (folder / LIVE_FILE).exists()
    assert re.search(r"no step is lost, .* hold of \d+ groups? again", events(folder, "restarted")[1]["text"])
    steps = [record["step"] for record in RunFolder.open(folder).read_metrics() if "timing_s/step" in record]
    assert steps == list(range(1, STEPS + 1)), "a step is missing, or stands twice"
    assert weights(tmp_path, "broken") == whole


@pytest.mark.slow
def test_without_restarts_the_first_fault_ends_the_run_and_a_resume_is_exact(
    whole: bytes, made: Made, tmp_path: Path
) -> None:
    faults = Faults(tmp_path / "ended", [(3, send("learner", signal.SIGKILL))])
    faults.start()
    with pytest.raises(Exception, match="died"):
        driver.train(config_of(made, tmp_path, "ended", "run.restarts=0"), live=False)
    driver.train(config_of(made, tmp_path, "ended"), resume=True, live=False)
    assert weights(tmp_path, "ended") == whole
    (changed,) = events(tmp_path / "ended", "settings_changed")
    assert changed["text"] == "resumed with other settings: run.restarts: 0 → 3"


@pytest.mark.slow  # a run with three restarts
def test_a_process_that_is_stopped_is_noticed(
    cluster: None, made: Made, tmp_path: Path, record_property: Measured
) -> None:
    roles = ("learner", "selector", "controller")
    faults = Faults(tmp_path / "stopped", [(3 * n, send(role, signal.SIGSTOP)) for n, role in enumerate(roles, 1)])
    faults.start()
    config = config_of(made, tmp_path, "stopped", "learner.workers=2", f"run.steps={STEPS + 3}")
    assert driver.train(config, live=False).status == "finished"
    for role, seconds in zip(roles, faults.result(), strict=True):
        record_property("measured", f"{role} stopped: the second step after it came after {seconds:.1f} s")
    restarts = events(tmp_path / "stopped", "restarting")
    assert all("answer" in event["text"] for event in restarts)
    learner, selector, controller = (event["text"] for event in restarts)
    assert "learner/" in learner
    assert "selector" in selector
    assert "another controller" in controller


@pytest.mark.slow  # two minutes
def test_a_soaked_run_makes_all_its_steps_and_leaves_nothing(
    made: Made, tmp_path: Path, record_property: Measured
) -> None:
    settings = [item for item in config_settings(made, tmp_path) if not item.startswith(("run.name", "run.dir"))]
    settings += ["generator.workers=2", "run.checkpoint.copy_every=5", "selector.no_signal=keep"]
    settings += ["generator.rollouts_per_prompt=4", "selector.keep=2", "learner.prompts_per_step=2"]
    result = soak(tmp_path, settings, steps=200, every=19, warm=True)
    said = (tmp_path / "soak.log").read_text()[-3000:]
    for fault in result["faults"]["rows"]:
        row = dict(zip(result["faults"]["columns"], fault, strict=True))
        assert row["seconds"] is not None, said
        record_property("measured", f"{row['fault']}: the second step after it came after {row['seconds']:.1f} s")
    assert {fault for _, fault, *_ in result["faults"]["rows"]} == {str(fault) for fault in KILLS}
    assert (result["faults_done"], result["faults_not_done"], result["ended_wrongly"]) == (10, [], 0), said
    # killed, told to end, and done
    assert sorted(result["exit_codes"]) == [-9, 0, 0], said
    assert result["exit_codes"][-1] == 0
    assert result["steps_recorded"] == 200
    assert not result["processes_left"]
    assert not result["ports_left"]
    assert not result["shared_memory_left"]


@pytest.mark.slow  # a run of its own command
def test_a_run_goes_on_when_its_gcs_is_killed_and_starts_actors_again(
    cold: None, made: Made, tmp_path: Path, record_property: Measured
) -> None:
    settings = [item for item in config_settings(made, tmp_path) if not item.startswith(("run.dir", "run.steps"))]
    run = FaultedRun(tmp_path, "headless", [*settings, "run.steps=40"])
    try:
        assert run.wait_for_step(5, 300), run.log.read_text()[-3000:]
        for fault in (Fault("gcs"), Fault("selector"), Fault("gcs", "stop")):
            cost = run.do(fault, 120)
            assert cost is not None
            assert cost["seconds"] is not None, run.log.read_text()[-3000:]
            record_property("measured", f"{fault}: the second step after it came after {cost['seconds']:.1f} s")
        assert run.end(300) == 0, run.log.read_text()[-3000:]
    finally:
        run.kill()


@pytest.mark.slow  # a run of its own command
def test_a_run_whose_gcs_is_lost_for_good_ends_with_a_saved_state(
    cold: None, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_storage", "memory")  # there is nothing to start it again from
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")  # Ray's own 60 s, shorter
    settings = [item for item in config_settings(made, tmp_path) if not item.startswith(("run.dir", "run.steps"))]
    run = FaultedRun(tmp_path, "headless", [*settings, "run.steps=100000"])
    assert run.wait_for_step(5, 300), run.log.read_text()[-3000:]
    (gcs,) = run.processes("gcs_server")
    gcs.kill()
    assert run.end(180) != 0
    saved, refused = checkpoints.newest_sound(run.folder.checkpoints, run.folder.copies)
    assert saved is not None
    assert not refused
    made_steps = max(record["step"] for record in run.folder.read_metrics())
    assert made_steps - checkpoints.read_state(saved).step <= 10, "copies are made each second step, and take a moment"
