"""The run folder: never overwritten, resumable, held by one writer."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pods_cluster.telemetry.jsonl import JsonLinesWriter
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError


def test_a_new_run_has_its_parts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "one", "run: {name: one}\n")
    assert folder.path == tmp_path / "runs" / "one"
    assert folder.config.read_text() == "run: {name: one}\n"
    assert folder.checkpoints.is_dir()
    assert folder.figures.is_dir()
    assert folder.read_metrics() == folder.read_events() == folder.read_samples() == []
    assert RunFolder.open(folder.path) == folder


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "one", "a: 1\n")
    writer = JsonLinesWriter(folder.metrics)
    writer.write({"step": 12, "time": 1.0, "elapsed": 1.0})
    writer.close()
    with pytest.raises(RunFolderError, match=r"one: holds a run already \(at step 12, last written .* ago\).*--resume"):
        RunFolder.create(tmp_path, "one", "a: 2\n")
    assert folder.config.read_text() == "a: 1\n"


def test_other_files_are_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds files already"):
        RunFolder.create(tmp_path, "full", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path, "file", "")
    with pytest.raises(RunFolderError, match=r"cannot be made .* run\.dir"):
        RunFolder.create(tmp_path / "file", "under_a_file", "")
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path, "empty", "")


def test_resuming_keeps_every_configuration(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "one", "v: 1\n")
    for version in (1, 2, 2, 3):
        folder = RunFolder.resume(tmp_path, "one", f"v: {version}\n")
    assert folder.config.read_text() == "v: 3\n"
    assert (folder.path / "config.1.yaml").read_text() == "v: 1\n"
    assert (folder.path / "config.2.yaml").read_text() == "v: 2\n"
    assert not (folder.path / "config.3.yaml").exists()


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no such run.*without --resume"):
        RunFolder.resume(tmp_path, "one", "")
    (tmp_path / "one").mkdir()
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        RunFolder.open(tmp_path / "one")


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "one", "")
    code = f"""
        from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError
        try:
            with RunFolder.open({str(folder.path)!r}).lock():
                print("locked")
        except RunFolderError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with folder.lock():
        held = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"process {os.getpid()} is writing this run" in held
    free = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert free == "locked\n"


def test_the_summary_is_replaced_in_one_piece(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "one", "")
    folder.write_summary({"steps": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_summary({"steps": float("nan")})
    assert folder.summary.read_text() == '{\n  "steps": 1\n}\n'
    assert [path.name for path in folder.path.glob(".summary*")] == []


@pytest.mark.parametrize("root", ["file", "file/below", "link", "/dev/null", "/dev/null/x"])
def test_a_file_in_the_way_of_the_runs_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(RunFolderError, match=r"run\.dir: '.*' cannot be a folder: .* is a file; set run\.dir"):
        RunFolder.refuse_occupied(root, "run")


@pytest.mark.parametrize("root", ["new", "new/below", "there", "to_there", "."])
def test_a_place_that_can_be_made_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "to_there").symlink_to("there")
    RunFolder.refuse_occupied(root, "run")
