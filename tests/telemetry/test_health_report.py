"""The health line where people meet it: on the panel, in plain output, in the summary, and read from a run's folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from pods_cluster.client import cli
from pods_cluster.telemetry import health_report
from pods_cluster.telemetry.health_report import read_health
from pods_cluster.telemetry.progress import Progress, ProgressState
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.report import render
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.summary import summarize
from tests.telemetry.synthetic import told_steps

SILENT = {"groups/trained": 1, "groups/no_signal": 30}


def steps(count: int, wrong_from: int, **wrong: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(step, values | (wrong if step >= wrong_from and "updates" in values else {}))
            for step, values in told_steps(count)]  # fmt: skip


def folder_of(tmp_path: Path, told: list[tuple[int, dict[str, Any]]]) -> RunFolder:
    folder = RunFolder.create(tmp_path, "r", "run:\n  steps: 40\n")
    with Recorder.for_run(folder, strict=True) as recorder:
        for step, values in told:
            recorder.step(step, values)
    return folder


def text_of(shown: Any) -> str:
    console = Console(record=True, width=400, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_the_panel_begins_with_the_line() -> None:
    state = ProgressState("r", 40)
    assert "health" not in text_of(state)
    for _, values in steps(5, 99):
        state.update(values)
    assert text_of(state).splitlines()[1].split()[1:3] == ["health", "healthy"]
    for _, values in steps(40, 10, **SILENT):
        state.update(values)
    assert "of the groups have no signal" in text_of(state).splitlines()[1]
    assert "choose prompts of another difficulty" in text_of(state).splitlines()[1]


def test_plain_output_says_a_finding_once_with_its_link() -> None:
    out = io.StringIO()
    with Recorder(strict=True) as recorder, Progress("r", 40, console=Console(file=out, width=400)) as progress:
        for step, values in steps(30, 10, **SILENT):
            recorder.step(step, values)
        progress.feed(recorder.poll().items)
    warnings = [line for line in out.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "of the groups have no signal" in warnings[0]
    assert warnings[0].endswith("(docs/troubleshooting.md#no-signal)")


def test_the_summary_has_what_held_and_how_long(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, steps(40, 31, **SILENT))
    summary = summarize(folder.read_metrics())
    assert [found["rule"] for found in summary.health] == ["no-signal"]
    assert summary.health[0]["link"] == "docs/troubleshooting.md#no-signal"
    held = [record["health/no-signal"] for record in folder.read_metrics() if "health/no-signal" in record]
    assert summary.health_shares == {"no-signal": sum(held) / len(held)}
    assert 0 < summary.health_shares["no-signal"] < 0.5
    text = text_of(render(summary))
    assert "of the groups have no signal" in text
    share = f"{100 * summary.health_shares['no-signal']:.0f} % of the steps"
    assert f"({share}, docs/troubleshooting.md#no-signal)" in text

    early = [(step, values | (SILENT if step <= 4 and "updates" in values else {})) for step, values in told_steps(40)]
    over = summarize(folder_of(tmp_path / "early", early).read_metrics())
    assert over.health == []
    assert "held earlier: no-signal in" in text_of(render(over))
    assert "healthy" not in text_of(render(summarize([])))


def test_a_folder_says_the_same_as_the_run_did(tmp_path: Path) -> None:
    assert read_health(folder_of(tmp_path / "none", [])) is None
    good = read_health(folder_of(tmp_path / "good", steps(20, 99)))
    assert good is not None
    assert (good.line, good.level, good.findings) == ("healthy", "info", [])
    bad = read_health(folder_of(tmp_path / "bad", steps(20, 5, **SILENT)))
    assert bad is not None
    assert [finding.rule for finding in bad.findings] == ["no-signal"]
    assert bad.level == "warning"
    assert bad.as_dict()["findings"][0]["link"] == "docs/troubleshooting.md#no-signal"


def test_trends_of_the_whole_run_are_known_from_its_end(tmp_path: Path, monkeypatch: Any) -> None:
    falls = [(step, values | ({"reward": 0.9 if step < 20 else 0.2} if "updates" in values else {}))
             for step, values in told_steps(60)]  # fmt: skip
    folder = folder_of(tmp_path, falls)
    whole = read_health(folder)
    assert whole is not None
    assert [finding.rule for finding in whole.findings] == ["reward-falls"]
    monkeypatch.setattr(health_report, "READ_BYTES", folder.metrics.stat().st_size // 4)
    end = read_health(folder)
    assert end is not None
    assert [finding.rule for finding in end.findings] == ["reward-falls"]
    assert "fell from 0.9" in end.line
    assert "go back to an earlier checkpoint" in end.line


def test_a_resumed_run_remembers_its_trends(tmp_path: Path) -> None:
    told = [(step, values | ({"reward": 0.9 if step < 20 else 0.2} if "updates" in values else {}))
            for step, values in told_steps(41)]  # fmt: skip
    folder = folder_of(tmp_path, told[:-2])
    step, values = next((step, values) for step, values in told[-2:] if "updates" in values)
    with Recorder.for_run(folder, resumed_from=step - 1, strict=True) as recorder:
        assert recorder.step(step, values)["health/reward-falls"] == 1.0
        told_again = [event["rule"] for what, event in recorder.poll().items if what == "event" and "rule" in event]
    assert told_again == ["reward-falls"]


def test_status_shows_the_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, steps(20, 5, **SILENT))
    shown = CliRunner().invoke(cli.app, ["status", str(folder.path)], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert "of the groups have no signal" in shown.output
    found = json.loads(CliRunner().invoke(cli.app, ["status", str(folder.path), "--json"]).output)["health"]
    assert found["level"] == "warning"
    assert found["line"].startswith(found["findings"][0]["text"])
