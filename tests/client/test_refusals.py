"""What cannot start is refused before Ray is; what was killed is called so; and the line that goes on is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pods_cluster.client import cli, driver, refusals
from pods_cluster.client.refusals import how_to_resume, refuse_start
from pods_cluster.client.run_state import read_run_state
from pods_cluster.config import Config, ConfigError, parse_config
from pods_cluster.run import checkpoints, live_file
from pods_cluster.run.errors import RunError
from pods_cluster.run.live_file import LIVE_FILE, living_process, write_live_file
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError
from pods_cluster.telemetry.summary import Summary
from tests.run.parts import YAML


def config_of(runs: Path, *overrides: str) -> Config:
    return parse_config(YAML, [f"run.dir={runs}", "run.name=r", "run.steps=5", "run.export=true", *overrides])


def ended_run(runs: Path, step: int, *, kind: str = "finished", seconds: float = 0.0) -> RunFolder:
    folder = RunFolder.create(runs, "r", "run:\n  steps: 5\n")
    with Recorder.for_run(folder) as recorder:
        recorder.event("started", "all workers are up")
        if kind:
            recorder.event(kind, "done")
    state = checkpoints.RunState(step=step, version=step, seconds=seconds, stream={}, ledger={}, attempts=[])
    checkpoints.finish(checkpoints.begin(folder.checkpoints, step), state, keep=3)
    (folder.model).mkdir()
    (folder.model / "config.json").write_text("{}")
    return folder


def refusal(config: Config, *, resume: bool = False) -> str:
    with pytest.raises((RunFolderError, ConfigError, checkpoints.CheckpointError)) as error:
        refuse_start(config, resume=resume)
    return str(error.value)


def test_a_free_name_starts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    refuse_start(config_of(tmp_path), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder(tmp_path: Path) -> None:
    ended_run(tmp_path, 3)
    assert re.search(r"r: holds a run already .*--resume, choose another run\.name", refusal(config_of(tmp_path)))


@pytest.fixture
def port() -> Iterator[int]:
    """Where something listens, as a cluster's head does."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        yield head.getsockname()[1]


def test_a_run_that_is_alive(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOMENT_SECONDS", 0.1)
    folder = ended_run(tmp_path, 3, kind="")
    write_live_file(folder, f"127.0.0.1:{port}")
    for resume in (False, True):
        text = refusal(config_of(tmp_path), resume=resume)
        assert f"this run is alive (process {os.getpid()})" in text
        assert f"`pods stop {folder.path}`" in text


@pytest.mark.parametrize("there", [True, False])
def test_a_process_that_is_about_to_end_is_waited_for(
    tmp_path: Path, port: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its cluster gone it has longer: as after `kill -9` of a command that had one of its own."""
    monkeypatch.setattr(refusals, "MOMENT_SECONDS", 60.0 if there else 0.0)
    monkeypatch.setattr(refusals, "ENDING_SECONDS", 0.0 if there else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as head:
        closed = head.getsockname()[1]
    folder = ended_run(tmp_path, 3, kind="")
    write_live_file(folder, f"127.0.0.1:{port if there else closed}")
    ending = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    end = threading.Timer(0.5, ending.kill)
    try:
        values = json.loads((folder.path / LIVE_FILE).read_text())
        theirs = {"pid": ending.pid, "began": live_file.process_began(ending.pid)}
        (folder.path / LIVE_FILE).write_text(json.dumps(values | theirs))
        end.start()
        refuse_start(config_of(tmp_path), resume=True)
        assert ending.wait(60) == -signal.SIGKILL
    finally:
        end.join()
        ending.kill()
        ending.wait()


@pytest.mark.parametrize(
    ("overrides", "seconds", "text"),
    [
        ([], 0, r"is finished \(run\.steps: 5, its newest checkpoint is of step 5\); raise run\.steps"),
        (["run.steps=9"], 0, ""),
        (["run.steps=9", "run.max_seconds=60"], 61, r"is finished \(run\.max_seconds: 60, it has worked 61 s\)"),
    ],
)
def test_resuming_a_finished_run(tmp_path: Path, overrides: list[str], seconds: float, text: str) -> None:
    ended_run(tmp_path, 5, seconds=seconds)
    if text:
        assert re.search(text, refusal(config_of(tmp_path, *overrides), resume=True))
    else:
        refuse_start(config_of(tmp_path, *overrides), resume=True)


def test_what_is_still_to_do_can_be_resumed(tmp_path: Path) -> None:
    folder = ended_run(tmp_path / "stopped", 3)
    refuse_start(config_of(tmp_path / "stopped"), resume=True)
    folder = ended_run(tmp_path / "unexported", 5)
    (folder.model / "config.json").unlink()
    refuse_start(config_of(tmp_path / "unexported"), resume=True)
    ended_run(tmp_path / "killed", 5, kind="")
    refuse_start(config_of(tmp_path / "killed"), resume=True)
    assert "there is no such run" in refusal(config_of(tmp_path / "none"), resume=True)


def test_wrong_names_of_rewards_and_rules(tmp_path: Path) -> None:
    assert "did you mean 'exact_match'" in refusal(config_of(tmp_path, "reward=[{name: exact_mach}]"))
    assert "max_variance" in refusal(config_of(tmp_path, "selector.rule=max_varance"))
    both = refusal(config_of(tmp_path, "reward=[{name: exact_mach}]", "selector.rule=max_varance")).splitlines()
    assert both[0] == "r: 2 problems"
    assert ["exact_match" in both[1], "max_variance" in both[2]] == [True, True]


def test_a_killed_run_is_called_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended_run(tmp_path, 3, kind="")
    live = folder.path / LIVE_FILE
    assert living_process(folder) is None
    write_live_file(folder, "10.0.0.1:6379")
    assert living_process(folder) == os.getpid()
    assert read_run_state(folder, "r").status == "running"

    values = json.loads(live.read_text())
    for gone in ({"pid": 2**22 + 1}, {"began": "1"}):  # no such process, and another one with its id
        live.write_text(json.dumps(values | gone))
        assert living_process(folder) is False
        state = read_run_state(folder, "r")
        assert (state.status, "--resume" in state.text) == ("killed", True)
    shown = CliRunner().invoke(cli.app, ["status", str(folder.path), "--json"])
    assert json.loads(shown.output)["status"] == "killed"
    refuse_start(config_of(tmp_path), resume=True)

    monkeypatch.setattr(live_file, "this_machine", lambda: ["elsewhere", "pid:[1]"])
    assert living_process(folder) is None
    assert read_run_state(folder, "r").status == "running"  # as it was just written


@pytest.mark.parametrize("ending", ["stopped", "failed", "not whole"])
def test_the_line_that_goes_on_is_told(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)

    def train(*_: Any, **__: Any) -> Summary:
        ended_run(tmp_path, 3)
        if ending == "failed":
            raise RunError("the controller died")
        if ending == "not whole":
            raise checkpoints.CheckpointError("no checkpoint is whole (...); copy one back, or begin the run anew")
        return Summary("r", "stopped", steps=3, seconds=1.0, weights_version=3)

    monkeypatch.setattr(driver, "train", train)
    overrides = [f"run.dir={tmp_path}", "run.name=r", "run.steps=5"]
    monkeypatch.setattr("sys.argv", ["pods", "train", str(file), *overrides])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    assert (end.value.code or 0) == (ending != "stopped")
    said = out.out if ending == "stopped" else out.err
    if ending == "not whole":
        assert "copy one back" in said
        assert "continue it" not in said, "it cannot be"
        return
    assert f"continue it from step-000003 with: pods train {file} {' '.join(overrides)} --resume" in said


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert how_to_resume(config, "pods train x --resume") == ""
    RunFolder.create(tmp_path, "r", "")
    assert (
        how_to_resume(config, "pods train x --resume")
        == "nothing was saved; begin it again with: pods train x --resume"
    )
