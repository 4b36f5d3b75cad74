"""What the Tab key offers, and `-h`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pods_cluster.client import cli
from pods_cluster.client.completion import override_names, run_names
from pods_cluster.config.problems import field_paths
from tests.dashboard.made import make_run


def test_fields_are_offered_level_by_level() -> None:
    assert "learner." in override_names("")
    assert "staleness=" in override_names("s")
    assert override_names("learner.l") == ["learner.learning_rate=", "learner.loss=", "learner.lora."]
    assert override_names("learner.kl") == ["learner.kl.coefficient=", "learner.kl.reference="], (
        "no space after a section"
    )
    assert override_names("learner.loss=") == override_names("zzz") == []
    offered, todo = set(), [""]
    while todo:
        for name in override_names(todo.pop()):
            (todo.append if name.endswith(".") else offered.add)(name)
    paths = [path for path in field_paths() if ".0." not in path]  # a list is given whole
    leaves = {path for path in paths if not any(other.startswith(path + ".") for other in paths)}
    assert offered == {f"{path}=" for path in leaves if not path.startswith("reward")}


def test_runs_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_names("") == []
    for name in ("first", "fifth", "second"):
        make_run(tmp_path / "runs", name, 1)
    assert run_names("fi") == ["fifth", "first"]
    assert run_names("*") == []


PODS = get_command(cli.app)  # built once: it takes longer than showing the help
COMMANDS = ["train", "check", "eval", "dashboard", "rewards", "quickstart", "submit", "runs", "status", "scale", "stop",
            "plan", "figure", "sweep", "compare", "import", "init"]  # fmt: skip


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_is_short_too(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for option in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            PODS.main([*command, option], prog_name="pods")
        assert ended.value.code == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "Usage" in outputs[0]


def test_every_command_is_tried() -> None:
    commands = [command for command in cli.app.registered_commands if command.callback is not None]
    assert {command.name or command.callback.__name__ for command in commands if command.callback} == set(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell: str) -> None:
    env = {"_PODS_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "pods tr", "COMP_WORDS": "pods tr", "COMP_CWORD": "1",
           "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    assert "train" in CliRunner().invoke(cli.app, [], prog_name="pods", env=env).output
