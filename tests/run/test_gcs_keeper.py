"""Where a local cluster's GCS keeps its tables. That it is started again from them: tests/client/test_recovery.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pods_cluster.run import gcs_keeper


def test_tables_lie_in_a_folder_of_their_own_and_those_of_killed_processes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_keeper.tempfile, "tempdir", str(tmp_path))
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)
    killed = tmp_path / f"{gcs_keeper._FOLDER}-{int(gone.stdout)}-abc"
    living = tmp_path / f"{gcs_keeper._FOLDER}-{os.getppid()}-abc"
    for folder in (killed, living):
        folder.mkdir()
    first, second = gcs_keeper.table_settings(), gcs_keeper.table_settings()
    assert first["gcs_storage"] == "rocksdb"
    assert Path(first["gcs_storage_path"]).is_dir()
    assert first["gcs_storage_path"] != second["gcs_storage_path"], "two clusters would share their tables"
    assert not killed.exists()
    assert living.exists()


@pytest.mark.parametrize("name", ["RAY_gcs_storage", "RAY_REDIS_ADDRESS"])
def test_another_storage_that_was_asked_for_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "memory")
    assert gcs_keeper.table_settings() == {}


class End:
    """A process as `subprocess` has it, which ends when `code` is set."""

    def __init__(self, code: int | None = None) -> None:
        self.code, self.pid = code, os.getpid()

    def poll(self) -> int | None:
        return self.code


class FakeNode:
    """Ray's node; the first `failing` starts of its GCS die at once."""

    def __init__(self, failing: int) -> None:
        self.failing, self.starts = failing, 0
        self.raylet = End()
        self.all_processes = {
            "raylet": [SimpleNamespace(process=self.raylet)],
            "gcs_server": [SimpleNamespace(process=End(-9))],
        }

    def kill_gcs_server(self, *, check_alive: bool) -> None:
        assert not check_alive
        self.all_processes.pop("gcs_server", None)

    def start_gcs_server(self) -> None:
        self.starts += 1
        self.all_processes["gcs_server"] = [SimpleNamespace(process=End(1 if self.starts <= self.failing else None))]
        if self.starts > self.failing:
            threading.Timer(0.1, setattr, (self.raylet, "code", 0)).start()  # and then the cluster ends


@pytest.mark.parametrize("failing", [0, 3])
def test_one_that_does_not_stay_up_is_started_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_keeper, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(gcs_keeper, "PAUSES", (0.0,) * 5)
    node = FakeNode(failing)
    gcs_keeper._keep(node)
    assert node.starts == failing + 1


def test_one_that_dies_on_and_on_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(gcs_keeper.log, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(gcs_keeper, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(gcs_keeper, "PAUSES", (0.0,) * 5)
    node = FakeNode(1000)
    gcs_keeper._keep(node)
    assert node.starts <= 5
    assert "does not stay up (exit code 1)" in told[-1]
