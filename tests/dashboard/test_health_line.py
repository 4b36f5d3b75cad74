"""The run's health on the page: the rules on the newest steps, with links into the guide that the server has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pods_cluster.dashboard import guide
from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.dashboard.history import History
from pods_cluster.telemetry.health_report import read_health
from pods_cluster.telemetry.health_rules import RULES
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from tests.dashboard.conftest import SECRET, connect
from tests.dashboard.made import config_text, make_run
from tests.telemetry.synthetic import told_steps


def made(root: Path, name: str, steps: int, *, first: int = 0, **values: float) -> RunFolder:
    """A run whose steps from `first` on have these values."""
    folder = RunFolder.create(root, name, config_text(root, name, steps))
    with Recorder.for_run(folder, strict=True) as recorder:
        for step, told in told_steps(steps):
            wrong = values if step > first and "loss" in told else {}
            recorder.step(step, {**told, **wrong})
        assert recorder.flush()
    return folder


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    made(tmp_path, "run", 30)
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        health = client.get("/api/runs/run").json()["health"]
    assert health["line"].startswith("healthy")
    assert health["level"] == "info"
    assert health["findings"] == []


def test_what_is_wrong_is_told_with_advice_and_a_link_that_leads_there(tmp_path: Path) -> None:
    made(tmp_path, "run", 30, first=15, **{"groups/no_signal": 30.0, "completions/clipped_ratio": 0.5})
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        health = client.get("/api/runs/run").json()["health"]
        pages = {finding["link"].split("#")[0]: "" for finding in health["findings"]}
        pages = {link: client.get(link).text for link in pages}
    assert {finding["rule"] for finding in health["findings"]} == {"no-signal", "truncated"}
    for finding in health["findings"]:
        link, _, place = finding["link"].partition("#")
        assert finding["level"] == "warning"
        assert finding["advice"]
        assert f'<h3 id="{place}">' in pages[link]
    assert health["line"].endswith("(+1 more)")


@pytest.mark.parametrize("values", [{}, {"groups/no_signal": 30.0}, {"reward": 0.05}, {"updates": 0.0}])
def test_the_page_says_what_the_command_says(tmp_path: Path, values: dict[str, float]) -> None:
    folder = made(tmp_path, "run", 45, first=32, **values)
    history = History(folder.metrics)
    while history.advance(4096):
        pass
    mine, command = history.health(), read_health(folder)
    assert mine is not None
    assert command is not None
    assert (mine.line, mine.level, mine.pace) == (command.line, command.level, command.pace)
    assert [finding.rule for finding in mine.findings] == [finding.rule for finding in command.findings]
    assert bool(mine.findings) == bool(values)


def test_before_the_first_step_there_is_no_health(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 0, ended=False)
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        assert client.get("/api/runs/run").json()["health"] is None


def test_prometheus_has_each_rule(tmp_path: Path) -> None:
    made(tmp_path, "run", 12, **{"groups/no_signal": 30.0})
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        text = client.get("/metrics").text
    found = dict(re.findall(r'^pods_health\{rule="([\w-]+)",run="run"\} ([\d.]+)$', text, re.MULTILINE))
    assert set(found) == {rule.name for rule in RULES}
    assert {rule for rule, value in found.items() if float(value)} == {"no-signal"}


def test_the_guide_has_every_rule_and_links_that_lead_somewhere() -> None:
    page = guide.page()
    anchors = set(re.findall(r'<h[123] id="([^"]+)">', page))
    assert {rule.name for rule in RULES} <= anchors
    links = re.findall(r'<a href="([^"]+)"', page)
    assert all(link.removeprefix("#") in anchors for link in links if link.startswith("#"))
    assert all(link.startswith(("#", "https://")) or link == "/" for link in links)
    assert "<table>" in page
