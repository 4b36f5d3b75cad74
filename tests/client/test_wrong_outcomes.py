"""What a command's exit status says of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pods_cluster.client import cli, driver
from pods_cluster.telemetry.summary import Summary
from tests.run.parts import YAML


@pytest.mark.parametrize(("version", "status"), [(0, 1), (1, 0)])
def test_a_run_that_trained_nothing_does_not_end_well(
    version: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary("r", "finished", steps=3, seconds=1.0, weights_version=version)
    monkeypatch.setattr(driver, "train", lambda *_, **__: summary)
    (tmp_path / "run.yaml").write_text(YAML)
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / "run.yaml"), f"run.dir={tmp_path}"])
    assert result.exit_code == status, result.output
