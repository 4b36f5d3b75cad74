"""Experiment trackers as sinks: what was told is read back with their own readers. Skipped where they are not installed."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.sinks import SinkUnavailable, TensorBoardSink, WandbSink
from pods_cluster.telemetry.tracker_sinks import MLFLOW_RUN, MlflowSink, TrackioSink
from tests.telemetry.synthetic import told_steps

CONFIG = {"run": {"name": "tracked"}, "learner": {"betas": [0.9, 0.99], "lora": None}, "staleness": 1,
          "judge": {"api_key": "sk-123"}}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return RunFolder.create(tmp_path, "tracked", "")


def tell(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        recorder.step(step, {"reward": step / 10, "rewards/even_digits/mean": 0.5})


def test_mlflow_has_the_run_and_a_resume_goes_on_with_it(folder: RunFolder) -> None:
    mlflow = pytest.importorskip("mlflow")
    with Recorder.for_run(folder, mlflow=True, config=CONFIG) as recorder:
        tell(recorder, 1, 2)
        recorder.warning("slow", "a slow worker")
        events = [item for kind, item in recorder.poll(0).items if kind == "event"]
        assert recorder.flush(60)
    assert any("MLflow has the run at file://" in event["text"] for event in events)
    with Recorder.for_run(folder, mlflow=True, config=CONFIG, resumed_from=2) as recorder:
        tell(recorder, 3)
        assert recorder.flush(60)
    client = mlflow.MlflowClient((folder.path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("pods-cluster").experiment_id])
    assert run.info.run_id == (folder.path / MLFLOW_RUN).read_text().strip()
    assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
    assert run.data.params == {"run.name": "tracked", "learner.betas": "[0.9, 0.99]", "staleness": "1",
                               "judge.api_key": "(hidden)"}  # fmt: skip
    assert run.data.tags["event.slow"] == "a slow worker"
    history = client.get_metric_history(run.info.run_id, "rewards/even_digits/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_trackio_has_the_run(folder: RunFolder) -> None:
    pytest.importorskip("trackio")
    with Recorder.for_run(folder, trackio=True, config=CONFIG) as recorder:
        tell(recorder, 1, 2)
        assert recorder.flush(60)
    (file,) = (folder.path.parent / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("tracked", 1), ("tracked", 2)]
    told = rows[0][2]
    assert b"rewards/even_digits/mean" in (told.encode() if isinstance(told, str) else told)


@pytest.mark.parametrize(("sink", "module"), [(MlflowSink, "mlflow"), (TrackioSink, "trackio")])
def test_a_tracker_that_is_not_installed_says_so(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, sink: type, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(SinkUnavailable, match=rf"run\.{module}: .*pip install 'pods-cluster\[{module}\]'"):
        sink(folder)


def test_a_server_that_does_not_answer_is_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with pytest.raises(SinkUnavailable, match=r"run\.mlflow: MLflow at http://127\.0\.0\.1:9 cannot be used"):
        MlflowSink(folder)


def test_a_sink_whose_package_is_missing_says_so(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(SinkUnavailable, match=r"tensorboard.*pip install 'pods-cluster\[tensorboard\]'"):
        Recorder.for_run(folder, tensorboard=True)
    with pytest.raises(SinkUnavailable, match=r"wandb.*pip install 'pods-cluster\[wandb\]'"):
        WandbSink(folder)
    Recorder.for_run(folder).close()  # the refused one let go of the folder


def test_tensorboard_reads_what_was_told(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(folder)
    with Recorder([sink], strict=True) as recorder:
        for step, values in told_steps(6, every=3):
            recorder.step(step, values)
        recorder.step(7, {"loss": math.nan})
        recorder.warning("slow", "a slow worker")
    with Recorder([TensorBoardSink(folder, purge_after=4)], strict=True) as recorder:
        recorder.step(5, {"reward": 0.25})
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    rewards = events.Scalars("reward")
    assert [event.step for event in rewards] == [1, 2, 3, 4, 5], "steps after the resumed one are purged"
    assert rewards[-1].value == 0.25
    assert [event.step for event in events.Scalars("eval/greedy_accuracy")] == [0, 3]


def test_wandb_offline_keeps_what_was_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(folder, {"staleness": 0})
    with Recorder([sink], strict=True) as recorder:
        for step, values in told_steps(3, every=3):
            recorder.step(step, values)
        recorder.event("checkpoint", "saved")
        assert recorder.flush(60)
        summary = dict(sink._run.summary)
        failed = recorder.step(4, {}).get("telemetry/failed_writes")
        recorder.close(60)
    assert summary["step"] == 3
    assert 0 < summary["reward"] < 1
    assert failed is None
    (written,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k" * 40}, "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_wandb_is_online_where_a_key_is_known(
    environment: dict[str, str], mode: str, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    real, asked = wandb.init, []

    def init(**options: Any) -> Any:
        asked.append(options["mode"])
        if options["mode"] == "online":  # there is no server in a test
            raise wandb.errors.CommError("no route to host")
        return real(**options)

    monkeypatch.setattr(wandb, "init", init)
    with Recorder.for_run(folder, wandb=True) as recorder:
        assert asked[0] == mode
        (event,) = [item for _, item in recorder.poll(0).items if item.get("kind") == "wandb"]
        assert "wandb sync" in event["text"]
        assert ("cannot be reached" in event["text"]) == (mode == "online")
        assert event["level"] == ("warning" if mode == "online" else "info")


def test_a_key_that_wandb_refuses_is_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)

    def init(**_: Any) -> Any:
        raise wandb.errors.AuthenticationError("invalid API key")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(SinkUnavailable, match=r"run\.wandb: .*invalid API key.*WANDB_MODE=offline"):
        WandbSink(folder)
