"""The Grafana board asks for series that `/metrics` has, and Prometheus is told where."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pods_cluster.dashboard.prometheus import exposition, series_name
from pods_cluster.dashboard.watcher import RunWatcher
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.metric_registry import Kind
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "pods.json").read_text())
_SERIES = re.compile(r"\b(pods_[a-z0-9_]+)\b(?:\{([^}]*)\})?")


def example(metric: Any) -> str:
    """A name of a family: `<fate>` becomes its first choice."""
    return re.sub(r"<([a-z_]+)>", lambda found: next(iter(metric.choices.get(found[1], ("some",)))), metric.name)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Series and their labels as `/metrics` gives them for a run that tells every metric there is."""
    root = tmp_path_factory.mktemp("runs")
    folder = RunFolder.create(root, "all", "run: {name: all}\n")
    metrics = [metric for metric in registry if metric.name not in ("step", "time", "elapsed")]
    with Recorder.for_run(folder, strict=True) as recorder:
        for step in (1, 2):
            recorder.step(step, {example(metric): step for metric in metrics})
        recorder.event("test", "one", level="warning")
        for cause in ("a rank", "the selector"):
            recorder.event("restarting", f"{cause} is lost", level="warning")
    runs = RunWatcher([root])
    try:
        text = exposition(runs, folder.metrics.stat().st_mtime).decode()
    finally:
        runs.close()
    assert 'pods_run_restarts_total{run="all"} 2.0' in text
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.match(r"(\w+)(?:\{(.*)\})? ", line)
            assert match is not None
            found[match[1]] = set(re.findall(r'(\w+)="', match[2] or ""))
    return found


def expressions() -> list[tuple[str, str, str]]:
    """(panel, expression, legend)."""
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    return [(panel["title"], t["expr"], t["legendFormat"]) for panel in panels for t in panel["targets"]]


def test_every_series_of_the_board_is_exported_with_its_labels(exported: dict[str, set[str]]) -> None:
    assert len(exported) > 100
    asked = set()
    for panel, expression, legend in expressions():
        found = _SERIES.findall(expression)
        assert found, panel
        for name, selector in found:
            assert name in exported, f"{panel}: /metrics has no {name}"
            used = set(re.findall(r"(\w+)=~?\"", selector)) | set(re.findall(r"{{(\w+)}}", legend))
            assert used <= exported[name], f"{panel}: {name} has labels {exported[name]}, not {used}"
            asked.add(name)
    assert len(asked) >= 50
    variables = {item["name"]: item for item in BOARD["templating"]["list"]}
    assert "pods_run_state" in variables["run"]["definition"]
    assert "run" in exported["pods_run_state"]


def test_counters_are_read_as_counters(exported: dict[str, set[str]]) -> None:
    """A counter's increase, a gauge's value: the other way round Grafana shows nonsense without a complaint."""
    gauges = {series_name(example(m))[0] for m in registry if m.kind is not Kind.COUNT}
    for panel, expression, _ in expressions():
        for name in re.findall(r"(?:rate|increase)\((pods_\w+)", expression):
            assert name.endswith("_total"), f"{panel}: {name} is no counter"
        for name, _ in _SERIES.findall(expression):
            assert name in gauges or name.endswith("_total") or name.startswith("pods_run_"), f"{panel}: {name}"


def test_the_board_is_whole() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${source}"
            assert "$run" in target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")


def test_prometheus_is_told_where_the_metrics_are() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "grafana" / "prometheus.yml").read_text())
    local, kubernetes = config["scrape_configs"]
    assert local["metrics_path"] == "/metrics"
    assert local["static_configs"][0]["targets"] == ["localhost:8765"]  # the command's own port
    assert {job["authorization"]["type"] for job in (local, kubernetes)} == {"Bearer"}
    (rule,) = kubernetes["relabel_configs"]
    cluster = yaml.safe_load((ROOT / "deploy" / "kuberay" / "raycluster.yaml").read_text())
    head = cluster["spec"]["headGroupSpec"]["template"]
    ports = [port["name"] for container in head["spec"]["containers"] for port in container["ports"]]
    assert rule["regex"] in ports
    labels = dict(
        item.split("=") for item in kubernetes["kubernetes_sd_configs"][0]["selectors"][0]["label"].split(",")
    )
    assert labels.items() <= head["metadata"]["labels"].items()


ALERTS = ROOT / "deploy" / "grafana" / "alerts.yml"


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def test_every_series_of_an_alert_is_exported_and_says_what_to_do(exported: dict[str, set[str]]) -> None:
    for rule in alerts():
        found = _SERIES.findall(rule["expr"])
        assert found, rule["alert"]
        for name, selector in found:
            assert name in exported, f"{rule['alert']}: /metrics has no {name}"
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= exported[name], rule["alert"]
        assert rule["annotations"]["action"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        for page in re.findall(r"docs/[\w-]+\.md", rule["annotations"]["action"]):
            assert (ROOT / page).is_file()


def test_every_alert_is_tried_quiet_and_firing() -> None:
    names = [rule["alert"] for rule in alerts()]
    quiet, loud = yaml.safe_load(ALERTS.with_name("alerts.test.yml").read_text())["tests"]
    assert [test["alertname"] for test in quiet["alert_rule_test"] if "exp_alerts" not in test] == names
    fired = [sample["labels"] for sample in loud["promql_expr_test"][0]["exp_samples"]]
    assert [re.findall(r'alertname="(\w+)"', labels)[0] for labels in fired] == names


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt install prometheus)"
)
@pytest.mark.parametrize("command", ["check rules alerts.yml", "test rules alerts.test.yml"])
def test_promtool_agrees(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=ALERTS.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
