"""`pods train` beside a controller that hangs: it ends with the cause, and leaves nothing behind. Real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from pods_cluster.actor_names import NAMESPACE
from pods_cluster.client import controller_watch, driver
from pods_cluster.client.demo import CONFIG
from pods_cluster.client.run_state import read_run_state
from pods_cluster.config import Config, load_config
from pods_cluster.run.errors import RunError
from pods_cluster.run.live_file import LIVE_FILE
from pods_cluster.telemetry.run_folder import RunFolder
from tests.tiny_run import Made


def config_of(made: Made, runs: Path, name: str, *overrides: str) -> Config:
    paced = (
        "generator.engine_options={tokens_per_second: 300, shortest: 2, longest: 12, accuracy: 0.5, reward_token: 5}"
    )
    return load_config(
        CONFIG,
        [
            *made.overrides(runs),
            f"run.name={name}",
            "run.steps=10000",
            "generator.rollouts_per_prompt=8",  # steps of a second
            "selector.keep=4",
            "learner.prompts_per_step=4",
            "run.eval.every=0",
            "run.checkpoint.every=0",
            "run.samples_every=0",
            "generator.engine=paced",
            "generator.workers=1",
            paced,
            "generator.max_tokens=12",
            "cluster.address=local",
            *overrides,
        ],
    )


def ended(pid: int, seconds: float) -> bool:
    """Whether the process is gone, or dead and not collected, within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_controller_that_stops_answering_ends_the_command_where_nothing_is_started_again(
    cluster: None, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_watch, "SILENCE_SECONDS", 5.0)
    hung: list[int] = []

    def hang_in_a_step() -> None:
        folder, deadline = tmp_path / "hung", time.monotonic() + 240
        while time.monotonic() < deadline:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and '"timing_s/step"' in metrics.read_text():
                hung.append(json.loads((folder / LIVE_FILE).read_text())["pid"])
                controller: Any = ray.get_actor("hung/controller/0", namespace=NAMESPACE)
                controller.__ray_call__.remote(lambda _: time.sleep(600))  # on its event loop
                return
            time.sleep(0.05)

    thread = threading.Thread(target=hang_in_a_step)
    thread.start()
    try:
        with pytest.raises(RunError, match=r"hung/controller/0: the run's controller did not answer for 5 s.*--resume"):
            driver.train(config_of(made, tmp_path, "hung", "run.restarts=0"), live=False)
    finally:
        thread.join()
    assert hung
    assert ended(hung[0], 60), "the process that hangs is left behind"
    deadline = time.monotonic() + 60  # what it started lets go of the run's lock a moment later
    while (status := read_run_state(RunFolder.open(tmp_path / "hung"), "hung").status) == "running":
        assert time.monotonic() < deadline, "a run whose process was killed counts as running"
        time.sleep(0.2)
    assert status == "failed"
    assert "did not answer for 5 s" in (tmp_path / "hung" / "events.jsonl").read_text().splitlines()[-1]
    assert not (tmp_path / "hung" / LIVE_FILE).exists()


def test_a_run_that_cannot_be_opened_in_time_is_given_up(
    cluster: None, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OPEN_SECONDS", 3.0)
    # meanwhile the controller answers: its silence is not what ends this
    monkeypatch.setattr(controller_watch, "SILENCE_SECONDS", 2.0)
    # the rule is imported while the run is opened
    config = config_of(made, tmp_path, "unopened", "selector.rule=tests.client.slow_rule:rule", "selector.settle=abort")
    with pytest.raises(RunError, match=r"unopened/controller/0: .* did not open the run within 3 s"):
        driver.train(config, live=False)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_a_signal_ends_the_run_with_its_state_saved(
    cluster: None, made: Made, tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / number.name
    if (before := signal.getsignal(number)) is signal.SIG_IGN:  # as `nohup` leaves SIGHUP, and it would stay ignored
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
        before = signal.SIG_DFL

    def send_in_a_step() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and '"timing_s/step"' in metrics.read_text():
                os.kill(os.getpid(), number)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=send_in_a_step)
    thread.start()
    try:
        summary = driver.train(config_of(made, tmp_path, number.name), live=False)
    finally:
        thread.join()
    assert summary.status == "stopped"
    assert list((folder / "checkpoints").glob("step-*")), "no state was saved"
    reason = "Ctrl-C" if number is signal.SIGINT else number.name
    assert reason in (folder / "events.jsonl").read_text()
    assert signal.getsignal(number) is before
