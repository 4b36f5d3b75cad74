"""What a command's exit status says of a run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pods_cluster.client import cli, driver
from pods_cluster.telemetry.summary import Summary


@pytest.mark.parametrize(("version", "status"), [(0, 1), (1, 0)])
def test_a_run_that_trained_nothing_does_not_end_well(
    version: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary("r", "finished", steps=3, seconds=1.0, weights_version=version)
    monkeypatch.setattr(driver, "train", lambda *_, **__: summary)
    monkeypatch.setattr(cli, "load_config", lambda *_: None)
    result = CliRunner().invoke(cli.app, ["train", "run.yaml"])
    assert result.exit_code == status, result.output
