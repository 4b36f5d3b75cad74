"""What a command's exit status says of a run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pods_cluster.client import cli, driver
from pods_cluster.telemetry.summary import Summary


@pytest.mark.parametrize(("trained", "status"), [(0.0, 1), (16.0, 0)])
def test_a_run_that_trained_nothing_does_not_end_well(
    trained: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary("r", "finished", steps=3, seconds=1.0, rollouts={"generated": 64.0, "trained": trained})
    monkeypatch.setattr(driver, "train", lambda *_, **__: summary)
    monkeypatch.setattr(cli, "load_config", lambda *_: None)
    result = CliRunner().invoke(cli.app, ["train", "run.yaml"])
    assert result.exit_code == status, result.output
