"""The recorder: complete records, nothing raised into training, resumed runs read as one."""

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.jsonl import read_lines
from pods_cluster.telemetry.metric_registry import MetricValueError, UnknownMetric
from pods_cluster.telemetry.ratios import Totals
from pods_cluster.telemetry.recorder import KEPT_ITEMS, Recorder
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError
from pods_cluster.telemetry.sink_queue import GIVE_UP_AFTER
from pods_cluster.telemetry.step_record import SampleGroup, drop_superseded, merge_steps
from pods_cluster.types import Fate, GroupId
from tests.telemetry.synthetic import rollouts, told_steps


class ListSink:
    """Keeps what it is given; raises or waits where told to."""

    name = "list"

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.steps: list = []
        self.events: list = []
        self.calls = 0
        self.error, self.gate = error, gate

    def write_step(self, record) -> None:
        self.calls += 1
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.steps.append(record)

    def write_event(self, event) -> None:
        self.events.append(event)

    def write_samples(self, groups) -> None: ...
    def retry(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "one", "")


def test_a_run_on_disk_is_what_was_told(folder: RunFolder) -> None:
    told = list(told_steps(20, every=5))
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.event("run_started", "started", pools={"generator": 1})
        made = [recorder.step(step, values) for step, values in told]
        assert recorder.flush()
    read = folder.read_metrics()
    assert read == made
    for (step, values), record in zip(told, read, strict=True):
        assert record["step"] == step
        for name, value in values.items():
            assert record[name] == pytest.approx(value, rel=1e-8)
        registry.check(record)
    assert [record["elapsed"] for record in read] == sorted(record["elapsed"] for record in read)
    assert len(merge_steps(read)) == 21
    assert folder.read_events()[0]["pools"] == {"generator": 1}


def test_ratio_and_rates_follow_from_the_counts() -> None:
    with Recorder(strict=True) as recorder:
        first = recorder.step(
            1,
            {
                "rollouts/generated": 130,
                "rollouts/scored": 128,
                "rollouts/trained": 32,
                "tokens/sampled": 3000,
                "tokens/trained": 500,
                "updates": 1,
                "timing_s/step": 4.0,
            },
        )
        nothing = recorder.step(2, {"rollouts/scored": 64, "rollouts/trained": 0, "timing_s/step": 2.0})
        third = recorder.step(3, {"rollouts/scored": 64, "rollouts/trained": 32, "rollout_to_update_ratio": 9.0})
        told = recorder.step(3, {"eval/reward": 0.5})
    assert first["rollout_to_update_ratio"] == 4.0
    assert first["rollout_to_update_ratio/cumulative"] == 4.0
    assert first["rollout_to_update_ratio/tokens"] == 6.0
    assert first["throughput/rollouts_generated"] == 32.5
    assert first["throughput/tokens_trained"] == 125.0
    assert first["throughput/updates"] == 0.25
    assert "rollout_to_update_ratio" not in nothing
    assert nothing["rollout_to_update_ratio/cumulative"] == 6.0
    assert third["rollout_to_update_ratio/cumulative"] == 4.0
    assert third["rollout_to_update_ratio"] == 9.0, "what the controller says is not overridden"
    assert set(told) == {"step", "time", "elapsed", "eval/reward"}


def test_strict_refuses_before_anything_is_counted() -> None:
    with Recorder(strict=True) as recorder:
        with pytest.raises(UnknownMetric, match="'rewards_mean'"):
            recorder.step(1, {"rewards_mean": 1.0, "rollouts/scored": 1, "rollouts/trained": 1})
        with pytest.raises(MetricValueError, match="loss: 'low' is a text"):
            recorder.step(1, {"rollouts/scored": 1, "rollouts/trained": 1, "loss": "low"})
        with pytest.raises(MetricValueError, match="elapsed: is set by the recorder"):
            recorder.step(1, {"elapsed": 1.0})
        assert recorder.totals.sums == {}
        assert recorder.poll().items == []


def test_the_environment_makes_recorders_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODS_STRICT_METRICS", "1")
    with Recorder() as recorder, pytest.raises(UnknownMetric):
        recorder.step(1, {"nope": 1})
    monkeypatch.delenv("PODS_STRICT_METRICS")
    with Recorder() as recorder:
        assert recorder.step(1, {"nope": 1})["nope"] == 1


def test_a_run_warns_once_and_goes_on() -> None:
    with Recorder(strict=False) as recorder:
        for step in range(3):
            record = recorder.step(step, {"nope": 2.0, "loss": "low", "reward": [1, 2], "step": 9, "kl": 0.5})
            assert record["nope"] == 2.0
            assert record["kl"] == 0.5
            assert record["step"] == step
            assert "loss" not in record
        events = [record for what, record in recorder.poll().items if what == "event"]
    assert [event["kind"] for event in events] == ["unknown_metric", "bad_metric", "bad_metric", "bad_metric"]
    assert {event["level"] for event in events} == {"warning"}
    assert "'nope'" in events[0]["text"]


def test_numbers_of_every_make(folder: RunFolder) -> None:
    torch = pytest.importorskip("torch")
    values = {
        "loss": torch.tensor(0.25, requires_grad=True),
        "grad_norm": np.float32(0.1),
        "rollouts/trained": np.int64(2**40),
        "updates": True,
        "reward": math.nan,
        "kl": -math.inf,
        "entropy": None,
        "learning_rate": 1.23456789123e-7,
    }
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.step(1, values)
    (line,) = folder.metrics.read_text().splitlines()
    raw = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert raw["reward"] is None
    assert raw["nonfinite"] == {"reward": "nan", "kl": "-inf"}
    (record,) = folder.read_metrics()
    assert record["loss"] == 0.25
    assert record["grad_norm"] == pytest.approx(0.1, rel=1e-6)
    assert record["rollouts/trained"] == 2**40
    assert record["updates"] == 1
    assert math.isnan(record["reward"])
    assert record["kl"] == -math.inf
    assert "entropy" not in record
    assert record["learning_rate"] == pytest.approx(1.23456789e-7, rel=1e-8)


def test_a_resumed_run_reads_as_one(folder: RunFolder) -> None:
    steps = [(step, values) for step, values in told_steps(30, seed=1) if "updates" in values]
    sample = SampleGroup(GroupId(0, 7), "17+25 = ", rollouts(GroupId(0, 7)), kept=[2], answer="42", fate=Fate.TRAINED)
    with Recorder.for_run(folder, strict=True) as recorder:
        for step, values in steps[:17]:
            recorder.step(step, values)
            recorder.samples(step, [sample])
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-20])  # a kill cut step 17
    at_ten = folder.read_metrics()[9]
    with Recorder.for_run(folder, resumed_from=10, strict=True) as recorder:
        assert recorder.elapsed >= at_ten["elapsed"]
        for step, values in steps[10:20]:
            recorder.step(step, values)
    with Recorder.for_run(folder, resumed_from=20, strict=True) as recorder:
        for step, values in steps[20:]:
            last = recorder.step(step, values)

    records = folder.read_metrics()
    assert [record["step"] for record in records] == list(range(1, 31))
    assert [record["elapsed"] for record in records] == sorted(record["elapsed"] for record in records)
    expected = Totals(values for _, values in steps)
    assert last["rollout_to_update_ratio/cumulative"] == pytest.approx(
        expected.sums["rollouts/scored"] / expected.sums["rollouts/trained"]
    ), "totals go on where the checkpoint left them"
    assert len(read_lines(folder.metrics)) == 16 + 10 + 10 + 2, "nothing is cut away: lines and markers stay"
    assert [line["step"] for line in folder.read_samples()] == list(range(1, 11))
    assert [event["step"] for event in folder.read_events() if event["kind"] == "resumed_from"] == [10, 20]


def test_superseded_steps_are_dropped_wherever_they_stand() -> None:
    lines = [
        {"step": 1},
        {"step": 3},
        {"step": 2},
        {"marker": "resumed_from", "step": 1},
        {"step": 2, "reward": 1},
        {"marker": "something newer", "step": 0},
        {"text": "no step"},
    ]
    assert drop_superseded(lines) == [{"step": 1}, {"step": 2, "reward": 1}]


def test_samples_show_what_was_kept_and_why(folder: RunFolder) -> None:
    group = GroupId(1, 5, 2)
    hostile = "<script>\x1b[2J\ud800" + "x" * 50_000
    made = rollouts(group, 3, hostile)
    sample = SampleGroup(group, "17+25 = ", made, kept={0, 2}, rule="max_variance", reason="ends")
    with Recorder.for_run(folder, strict=True) as recorder:
        recorder.samples(4, [sample])
    (line,) = folder.read_samples()
    assert (line["group"], line["rule"], line["reason"], line["fate"]) == ("1.5.2", "max_variance", "ends", None)
    assert [rollout["kept"] for rollout in line["rollouts"]] == [True, False, True]
    assert line["rollouts"][2]["reward"] == 1.0
    assert line["rollouts"][0]["parts"] == {"arithmetic": 0.0, "format": None}
    assert line["rollouts"][0]["text"].startswith("<script>")
    assert "characters left out" in line["rollouts"][0]["text"]
    assert len(line["rollouts"][0]["text"]) < 21_000


@pytest.mark.parametrize("apart", [False, True], ids=["steps at once", "each after the one before was written"])
def test_a_failing_sink_is_told_once_and_left_alone_in_the_end(apart: bool) -> None:
    """What such a sink takes in between, events and retries, does not make its failures less."""
    bad, good = ListSink(error=RuntimeError("no network")), ListSink()
    bad.name = "bad"
    with Recorder([bad, good], strict=True) as recorder:
        for step in range(1, GIVE_UP_AFTER + 6):
            recorder.step(step, {"reward": 0.5})
            assert not apart or recorder.flush()
        assert recorder.flush()
        last = recorder.step(99, {"reward": 0.5})
        texts = [record["text"] for what, record in recorder.poll().items if what == "event"]
    assert len(good.steps) == GIVE_UP_AFTER + 6
    assert bad.calls == GIVE_UP_AFTER
    assert last["telemetry/failed_writes"] == GIVE_UP_AFTER
    assert len(texts) == 2
    assert "bad sink failed (RuntimeError: no network)" in texts[0]
    assert "left alone" in texts[1]
    assert len(good.events) == 2


def test_a_hanging_sink_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pods_cluster.telemetry.sink_queue.QUEUED_ITEMS", 50)
    gate = threading.Event()
    recorder = Recorder([ListSink(gate=gate)], strict=True)
    for step in range(200):
        recorder.step(step, {"reward": 0.5})
    assert recorder.dropped > 100
    assert not recorder.flush(timeout=0.05)
    recorder.close(timeout=0.05)
    gate.set()


def test_a_full_disk_does_not_stop_the_run(folder: RunFolder) -> None:
    folder.metrics.symlink_to("/dev/full")
    with Recorder.for_run(folder, strict=True) as recorder:
        for step in range(1, 6):
            recorder.step(step, {"reward": 0.5})
            assert recorder.flush()
        last = recorder.step(6, {"reward": 0.5})
    assert last["telemetry/failed_writes"] >= 5
    (event,) = [event for event in folder.read_events() if event["level"] == "warning"]
    assert "No space left" in event["text"]


def test_polling_sees_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(strict=True) as recorder:
        recorder.step(1, {"reward": 0.1})
        recorder.warning("slow", "slow worker")
        feed = recorder.poll()
        assert [what for what, _ in feed.items] == ["step", "event"]
        assert recorder.poll(feed.cursor).items == []
        for step in range(5000):
            recorder.step(step, {"reward": 0.1})
        late = recorder.poll(feed.cursor)
        assert late.missed == 5000 - KEPT_ITEMS
        assert len(late.items) == KEPT_ITEMS
        assert late.items[-1][1]["step"] == 4999


def test_one_recorder_a_run(folder: RunFolder) -> None:
    recorder = Recorder.for_run(folder)
    with pytest.raises(RunFolderError, match="is writing this run"):
        Recorder.for_run(folder)
    recorder.close()
    recorder.close()
    assert recorder.event("late", "after the end")["text"] == "after the end"
    Recorder.for_run(folder).close()
