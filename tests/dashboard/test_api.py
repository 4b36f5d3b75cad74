from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.dashboard.prometheus import series_name
from tests.dashboard.conftest import SECRET, connect
from tests.dashboard.made import HOSTILE, append, make_run, step_line
from tests.telemetry.synthetic import told_steps


def test_runs_are_listed_with_their_state(client: TestClient) -> None:
    runs = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(runs) == {"first", "second"}
    assert runs["first"]["status"] == "finished"
    assert (runs["first"]["step"], runs["first"]["steps"]) == (60, 60)
    assert runs["second"]["step"] == 30


def test_a_run_tells_state_totals_and_metrics(client: TestClient) -> None:
    detail = client.get("/api/runs/first").json()
    told = [values for _, values in told_steps(60) if "rollouts/trained" in values]
    assert detail["totals"]["rollouts/trained"] == sum(values["rollouts/trained"] for values in told)
    assert detail["latest"]["loss"] == pytest.approx(told[-1]["loss"], rel=1e-6)
    assert detail["rows"] == 61
    assert detail["progress"] == 1
    recent = told[-20:]
    seconds = sum(values["timing_s/step"] for values in recent)
    rate = sum(values["rollouts/generated"] for values in recent) / seconds
    assert detail["rates"]["rollouts/generated"] == pytest.approx(rate, rel=1e-4)
    loss = next(metric for metric in detail["metrics"] if metric["name"] == "loss")
    assert loss["meaning"]
    assert loss["section"] == "Learning"
    assert (detail["warnings"], detail["errors"], detail["samples"]) == (1, 0, 6)
    assert [event["kind"] for event in detail["worker_events"]] == ["worker_failed"]


def test_curves_are_the_values_that_were_told(client: TestClient) -> None:
    told = {step: values["reward"] for step, values in told_steps(60) if "reward" in values}
    found = client.get(
        "/api/runs/first/series", params={"metric": ["reward", "unheard"], "start": 10, "end": 19}
    ).json()
    assert found["x"] == list(range(10, 20))
    assert found["series"]["reward"]["mean"] == pytest.approx([told[step] for step in range(10, 20)], rel=1e-5)
    assert found["series"]["unheard"]["mean"] == [None] * 10
    bucketed = client.get("/api/runs/first/series", params={"metric": "reward", "points": 8}).json()
    assert len(bucketed["x"]) <= 8
    assert bucketed["bucket"] == 8
    assert min(bucketed["series"]["reward"]["low"]) == pytest.approx(min(told.values()), rel=1e-5)
    assert max(bucketed["series"]["reward"]["high"]) == pytest.approx(max(told.values()), rel=1e-5)


def test_the_latest_record(client: TestClient) -> None:
    record = client.get("/api/runs/first/latest").json()["record"]
    assert record["step"] == 60
    assert "eval/greedy_accuracy" in record
    assert "loss" in record


def test_events_are_paged_newest_first_and_filtered(client: TestClient) -> None:
    page = client.get("/api/runs/first/events", params={"limit": 2}).json()
    assert [event["kind"] for event in page["events"]] == ["finished", "worker_failed"]
    assert page["more"]
    rest = client.get("/api/runs/first/events", params={"before": page["events"][-1]["id"]}).json()
    assert [event["kind"] for event in rest["events"]] == ["starting"]
    assert not rest["more"]
    only = client.get("/api/runs/first/events", params={"level": ["warning", "error"]}).json()
    assert [event["kind"] for event in only["events"]] == ["worker_failed"]


def test_sampled_groups_are_listed_and_opened(client: TestClient) -> None:
    page = client.get("/api/runs/first/samples", params={"start": 20, "end": 40}).json()
    assert [(item["step"], item["rollouts"], item["kept"]) for item in page["samples"]] == [(30, 8, 2)] * 2
    assert page["samples"][0]["reward_mean"] == pytest.approx(1 / 8)
    group = client.get(f"/api/runs/first/samples/{page['samples'][0]['id']}").json()
    assert [row["index"] for row in group["rollouts"] if row["kept"]] == [1, 2]
    assert group["rollouts"][2]["parts"] == {"arithmetic": 1.0, "format": None}
    assert group["rollouts"][0]["text"] == HOSTILE
    assert group["reason"].startswith("2 of 8 scored rollouts")
    assert client.get("/api/runs/first/samples/1").status_code == 404


def test_configuration_and_summary(client: TestClient) -> None:
    found = client.get("/api/runs/first/config").json()
    assert found["config"]["selector"]["keep"] == 16
    assert "selector:" in found["text"]
    missing = client.get("/api/runs/first/summary")
    assert missing.status_code == 404
    assert "when the run ends" in missing.json()["detail"]


def test_pickled_functions_are_not_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 2)
    folder.config.write_text("reward: [{name: '__main__:mine', code: eJxrYJk6xMAAAAsuAhI=}, {name: tag_count}]\n")
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        found = client.get("/api/runs/run/config").json()
    assert found["config"]["reward"][0] == {"name": "__main__:mine", "code": "a pickled function"}
    assert "eJxrYJk6" not in found["text"]


def test_a_summary_is_passed_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 2)
    folder.write_summary({"steps": 2, "ratio": 4.5})
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        assert client.get("/api/runs/run/summary").json()["summary"] == {"steps": 2, "ratio": 4.5}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/none", 404),
        ("/api/runs/..%2f..%2fetc", 404),
        ("/api/runs/first%00", 422),
        ("/api/runs/first/series", 422),
        ("/api/runs/first/series?metric=loss&points=1", 422),
        ("/api/runs/first/series?metric=loss&points=99999", 422),
        ("/api/runs/first/series?metric=loss&x=__class__", 422),
        ("/api/runs/first/series?" + "&".join(f"metric=m{index}" for index in range(65)), 422),
        ("/api/runs/first/events?limit=0", 422),
        ("/api/runs/first/events?level=debug", 422),
        ("/api/runs/first/samples/-1", 422),
        ("/api/stream", 422),
        ("/api/stream?run=none", 404),
        ("/static/..%2fapp.py", 404),
        ("/static/app.py", 404),
    ],
)
def test_what_is_wrong_is_refused(client: TestClient, path: str, status: int) -> None:
    assert client.get(path).status_code == status


def test_lines_that_no_run_writes_do_no_harm(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "odd", 3, ended=False)
    for path, text in (
        (folder.metrics, '{"step": 4, "loss": 1e999, "\\ud800": 1, "reward": 1}'),
        (folder.events, '{"kind": "odd", "text": "\\ud800", "n": 1e999, "deep": {"\\udfff": [1e999]}}'),
        (folder.events, '{"kind": "odd", "time": "late", "level": "loud", "step": "x"}'),
        (
            folder.samples,
            '{"step": 9, "group": 7, "prompt": null, "rollouts": [1, {}, {"index": "a", "reward": 1e999, "kept": 1, '
            '"parts": [], "versions": ["b"], "text": "\\ud800"}], "extra": {"a": 1e999}}',
        ),
    ):
        with path.open("a") as file:
            file.write(text + "\n")
    (tmp_path / "odd" / "config.yaml").write_text("1: {2020-01-01: !!binary /w==}\nrun: [")
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        for path in ("", "/latest", "/events", "/samples", "/config", "/series?metric=loss&metric=reward"):
            answer = client.get(f"/api/runs/odd{path}")
            assert answer.status_code == 200, (path, answer.text)
        newest = client.get("/api/runs/odd/samples").json()["samples"][0]
        group = client.get(f"/api/runs/odd/samples/{newest['id']}").json()
        assert [row["text"] for row in group["rollouts"]] == ["", "?"]
        assert client.get("/api/runs").json()["runs"][0]["step"] == 4
        assert client.get("/metrics").status_code == 200


def test_an_empty_folder_has_no_runs_until_one_begins(tmp_path: Path) -> None:
    app = create_app([tmp_path], token=Token(SECRET))
    with connect(app) as client:
        assert client.get("/api/runs").json() == {"runs": []}
        assert client.get("/").status_code == 200
        make_run(tmp_path, "late", 1)
        app.state.runs.find()
        assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["late"]


def test_prometheus_reads_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 40, ended=False)
    append(folder.metrics, step_line(41, **{"rewards/a.b/mean": 0.5, "timing_s/step": 2.0}))
    with connect(create_app([tmp_path], token=Token(SECRET))) as client:
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    told = [values for _, values in told_steps(40) if "rollouts/trained" in values]
    trained = families["pods_rollouts_trained"]
    assert trained.type == "counter"
    assert trained.samples[0].value == sum(values["rollouts/trained"] for values in told)
    assert trained.samples[0].labels == {"run": "run"}
    rewards = {sample.labels["name"]: sample.value for sample in families["pods_rewards_mean"].samples}
    assert rewards["a.b"] == 0.5
    states = {sample.labels["state"]: sample.value for sample in families["pods_run_state"].samples}
    assert states == {"running": 1, "finished": 0, "stopped": 0, "failed": 0, "killed": 0, "silent": 0}
    assert families["pods_step"].samples[0].value == 41


@pytest.mark.parametrize(
    ("name", "series", "labels"),
    [
        ("loss", "pods_loss", {}),
        ("timing_s/update", "pods_timing_s_update", {}),
        ("groups/no_signal", "pods_groups", {"fate": "no_signal"}),
        ("rewards/my/reward/mean", "pods_rewards_mean", {"name": "my/reward"}),
        ("scoring/failures/timeout/a/b", "pods_scoring_failures", {"kind": "timeout", "reward": "a/b"}),
        ("unknown name", "pods_unknown_name", {}),
    ],
)
def test_names_for_prometheus(name: str, series: str, labels: dict[str, str]) -> None:
    assert series_name(name)[:2] == (series, labels)


def test_the_page_and_its_files_are_there(client: TestClient) -> None:
    page = client.get("/").text
    assert "PLOTLY_VERSION" not in page
    assert "https://" not in page, "nothing is loaded from elsewhere"
    for name in ("app.js", "base.css", "plot.js", "plotly-basic.min.js"):
        answer = client.get(f"/static/{name}", headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        again = client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert "immutable" in client.get("/static/plotly-basic.min.js").headers["cache-control"]


@pytest.mark.parametrize("name", ["base.css", "parts.css"])
def test_every_block_of_the_style_sheets_ends(client: TestClient, name: str) -> None:
    depth = 0
    for line in client.get(f"/static/{name}").text.splitlines():
        assert depth == 0 or line.startswith((" ", "}")), f"{line}: lies inside the block before it"
        depth += line.count("{") - line.count("}")
        assert depth >= 0, line
    assert depth == 0


def test_health(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"


def test_the_schema_describes_every_route(client: TestClient) -> None:
    schema = client.get("/api/openapi.json").json()
    assert {"/api/runs", "/api/runs/{run}/series", "/api/stream", "/api/runs/{run}/scale", "/metrics"} <= set(
        schema["paths"]
    )
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), f"{method} {path} is not described"
    assert len(json.dumps(schema)) < 200_000
