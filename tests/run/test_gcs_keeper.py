"""Where a local cluster's GCS keeps its tables. That it is started again from them: tests/client/test_recovery.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
