"""Files that grow, break, shrink and are taken back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pods_cluster.client import run_state
from pods_cluster.dashboard import history
from pods_cluster.dashboard.history import History
from pods_cluster.dashboard.run_view import RunView
from pods_cluster.dashboard.watcher import RunWatcher
from pods_cluster.telemetry import line_tail
from pods_cluster.telemetry.line_tail import LineTail, newest, parse, sample_lines
from pods_cluster.telemetry.run_folder import RunFolder, RunFolderError
from pods_cluster.telemetry.step_record import resume_marker
from tests.dashboard.made import append, make_run, sample_line, step_line


def read(path: Path) -> History:
    found = History(path)
    while found.advance(2**16):
        pass
    return found


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert tail.poll() == []
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert [line.data for line in tail.poll()] == [b'{"a": 1}']
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b": 2}\n\n{}\n")
    found = tail.poll()
    assert [parse(line.data) for line in found] == [{"b": 2}, {}]
    text = path.read_bytes()
    assert all(text[offset : offset + len(data)] == data for offset, data in found)


def test_a_line_longer_than_a_slice_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 5000 + b'"}\n{"next": 1}\n')
    tail = LineTail(path)
    found = []
    while batch := tail.poll(limit=64):
        found += batch
    assert [len(line.data) for line in found] == [5012, 11]


def test_an_endless_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tail, "LONGEST_LINE", 1024)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 5000 + b'\n{"step": 1}\n')
    tail = LineTail(path)
    found = []
    while not tail.caught_up:
        found += tail.poll(limit=512)
    assert [line.data for line in found] == [b'{"step": 1}']


def test_a_replaced_or_shortened_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *(step_line(step, loss=1.0) for step in range(1, 9)))
    found = read(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    other = tmp_path / "other"
    append(other, step_line(3, loss=2.0))
    os.replace(other, path)
    found.advance(2**16)
    assert found.columns.steps.tolist() == [3]
    assert found.drain()[1]


def test_broken_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1}\n{"step": 2, "lo\n[1]\nnull\n\xff\xfe\n{"step": 3, "loss": 3}\n')
    found = read(path)
    assert found.columns.steps.tolist() == [1, 3]
    assert found.bad_lines == 4


def test_steps_that_a_resume_took_back_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *(step_line(step, loss=float(step), kl=1.0) for step in range(1, 11)))
    found = read(path)
    found.drain()
    append(path, resume_marker(6, 1.0), step_line(7, loss=70.0))
    found.advance(2**16)
    assert found.columns.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.columns.record() == {"step": 7, "time": 1_700_000_007.0, "elapsed": 7.0, "loss": 70.0}
    assert found.drain() == ([7], True)


def test_values_that_are_not_finite_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, step_line(1, loss=1.0), step_line(2, loss=float("nan")), step_line(3, loss=float("-inf")))
    found = read(path)
    assert found.columns.nonfinite == {"loss": [2, 3]}
    assert "loss" not in found.columns.record()


def test_a_long_history_is_shown_by_a_sample_until_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PREVIEW_ABOVE", 1000)
    path = tmp_path / "metrics.jsonl"
    append(path, *(step_line(step, reward=step / 2000) for step in range(1, 2001)))
    append(path, resume_marker(1500, 1.0), *(step_line(step, reward=9.0) for step in range(1501, 1801)))
    found = History(path)
    sampled = found.columns
    assert 50 < sampled.rows < 600
    assert sampled.last_step == 1800, "the newest step is always there"
    steps = sampled.steps.tolist()
    old = [
        record for record in map(sampled.record, range(sampled.rows)) if record["step"] > 1500 and record["reward"] < 9
    ]
    assert steps == sorted(set(steps))
    assert len(old) <= 1, "steps that were taken back show through, but for one that the sample cannot know of"
    assert found.totals(["updates"]) == {}, "a sample has no totals"
    while found.progress < 1:
        found.advance(4096)
    assert found.columns.rows == 1800
    assert found.drain()[1], "the page must hear that the curves are whole now"


@pytest.mark.parametrize("preview_above", [1000, 2**40])
def test_a_history_that_was_shown_in_part_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preview_above: int
) -> None:
    """With a preview or without: curves that were fetched while the file was read are no longer right at its end."""
    monkeypatch.setattr(history, "PREVIEW_ABOVE", preview_above)
    folder = make_run(tmp_path, "run", 0, ended=False)
    append(folder.metrics, *(step_line(step, reward=1.0, updates=1.0) for step in range(1, 301)))
    found = RunView(folder, "run")
    found.advance(2048)
    assert found.history.progress < 1
    assert found.history.totals(["updates"]) == {}, "a part has no totals"
    resets = 0
    while found.loading:
        resets += found.advance(2048).reset
    assert resets == 1
    assert found.history.columns.rows == 301, "with the evaluation before the first step"
    assert found.history.totals(["updates"]) == {"updates": 300.0}
    append(folder.metrics, step_line(301, reward=1.0))
    change = found.advance()
    assert (change.reset, [row["step"] for row in change.rows], change.after) == (False, [301], 300)


def test_a_history_read_at_once_needs_no_second_look(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 5, ended=False)
    assert not RunView(folder, "run").advance().reset


def test_samples_of_lines_are_whole_and_end_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "text": "x" * (step % 90)} for step in range(500)))
    for count in (1, 7, 100, 5000):
        found = sample_lines(path, count)
        steps = [value["step"] for value in found]
        assert steps == sorted(set(steps))
        assert steps[0] == 0
        assert steps[-1] == 499
    assert sample_lines(tmp_path / "none", 5) == []


def test_the_newest_line_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, *({"n": number, "text": "x" * 100} for number in range(1000)))
    path.write_bytes(path.read_bytes() + b'{"n": 5000')
    assert newest(path, lambda line: line["n"] % 2 == 0, size=4096) == {"n": 998, "text": "x" * 100}
    assert newest(path, lambda line: line["n"] == 1, size=4096) is None


def test_a_view_tells_what_is_new(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 12, ended=False)
    found = RunView(folder, "run")
    while found.loading:
        found.advance()
    assert not found.advance()
    append(folder.metrics, step_line(13, loss=0.5))
    append(folder.samples, sample_line(13))
    append(folder.events, {"time": 1.0, "elapsed": 1.0, "step": 13, "kind": "failed", "level": "error", "text": "OOM"})
    change = found.advance()
    assert [row["step"] for row in change.rows] == [13]
    assert [event["kind"] for event in change.events] == ["failed"]
    assert change.samples == 1
    assert not change.reset
    assert found.status() == ("failed", "OOM")
    assert found.levels == {"info": 1, "warning": 1, "error": 1}


def test_many_steps_at_once_are_told_as_a_reset(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 5, ended=False)
    found = RunView(folder, "run")
    found.advance()
    append(folder.metrics, *(step_line(step, loss=1.0) for step in range(6, 100)))
    change = found.advance()
    assert change.reset
    assert [row["step"] for row in change.rows] == [99]


def test_samples_that_a_resume_took_back_are_gone(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 60)
    found = RunView(folder, "run")
    found.advance()
    append(folder.samples, resume_marker(30, 1.0), sample_line(35))
    found.advance()
    assert [entry.step for entry in found.samples.entries] == [10, 10, 30, 30, 35]
    assert all(found.samples.at(entry.offset) is entry for entry in found.samples.entries)
    assert found.samples.at(1) is None


def test_states_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 3, ended=False)
    found = RunView(folder, "run")
    found.advance()
    written = folder.metrics.stat().st_mtime
    assert found.status(now=written + 5)[0] == "running"
    assert found.status(now=written + 2 * run_state.SILENT_AFTER)[0] == "silent"
    with folder.lock():
        assert found.status(now=written + 2 * run_state.SILENT_AFTER)[0] == "running"
    append(folder.events, {"kind": "finished", "text": "stopped at step 3: asked", "level": "info"})
    found.advance()
    assert found.status()[0] == "stopped"
    append(folder.events, {"kind": "starting", "text": "", "level": "info"})
    found.advance()
    assert found.status(now=written + 5)[0] == "running"


def test_secrets_in_the_configuration_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "a: {api_key: k-123, hf_token: t-123, max_tokens: 9, list: [{password: p-123}]}"
    )
    text, tree = RunView(RunFolder(tmp_path), "run").config()
    assert "123" not in text
    assert tree["a"]["max_tokens"] == 9
    assert tree["a"]["api_key"] == "(hidden)"


def test_runs_come_and_go(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "same", 2)
    make_run(tmp_path / "b", "same", 2)
    runs = RunWatcher([tmp_path / "a", tmp_path / "b" / "same"])
    assert sorted(runs.ids()) == ["same", "same~2"]
    make_run(tmp_path / "a", "new", 3)
    runs.find()
    assert sorted(found.id for found in runs.states()) == ["new", "same", "same~2"]
    assert runs.get("new").history.columns.last_step == 3
    (tmp_path / "a" / "new").rename(tmp_path / "gone")
    runs.find()
    with pytest.raises(KeyError):
        runs.get("new")


def test_open_runs_are_closed_when_they_take_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pods_cluster.dashboard.watcher.MEMORY_BYTES", 150_000)
    for name in ("a", "b", "c", "d"):
        make_run(tmp_path, name, 200)
    runs = RunWatcher([tmp_path])
    views = [runs.get(name) for name in ("a", "b", "c", "d")]
    assert runs.get("d") is views[3]
    assert len(runs._open) < 4
    assert runs.get("a").history.columns.last_step == 200, "one that was closed is opened again"


@pytest.mark.parametrize("paths", [[], ["nowhere"]])
def test_a_missing_folder_is_refused_by_name(tmp_path: Path, paths: list[str]) -> None:
    with pytest.raises(RunFolderError, match=paths[0] if paths else "no path"):
        RunWatcher([tmp_path / path for path in paths])
