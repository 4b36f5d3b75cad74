"""Runs are found by folder or name, and waited for with a deadline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pods_cluster.client import run_handle
from pods_cluster.client.controls import ControlFailed, LiveStatus, NotLive
from pods_cluster.client.run_handle import RunAccessError, RunHandle, find_run
from pods_cluster.run.live_file import LIVE_FILE, remove_live_file, write_live_file
from tests.dashboard.made import make_run


def test_a_run_is_found_by_its_folder_and_by_its_name(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "first", 2)
    for target in (str(folder.path), "first"):
        found = find_run(target, root=tmp_path)
        assert (found.name, found.folder, found.address) == ("first", folder, None)
    with pytest.raises(
        RunAccessError, match=r"first: the run is not alive, it has finished; more steps: `pods train …"
    ):
        _ = found.controls
    make_run(tmp_path, "stopped", 2, ended=False)
    with pytest.raises(
        RunAccessError, match=r"stopped: the run is not alive; continue it with `pods train … --resume`"
    ):
        _ = find_run("stopped", root=tmp_path).controls
    write_live_file(folder, "10.0.0.1:6379")
    assert find_run("first", root=tmp_path).address == "10.0.0.1:6379"
    assert find_run("first", "other:6379", root=tmp_path).address == "other:6379"
    killed = json.loads((folder.path / LIVE_FILE).read_text()) | {"began": "1"}  # another process has its id by now
    (folder.path / LIVE_FILE).write_text(json.dumps(killed))
    with pytest.raises(RunAccessError, match=r"first: the run was killed; continue it with"):
        _ = find_run("first", root=tmp_path).controls
    remove_live_file(folder)
    assert find_run("first", root=tmp_path).address is None


def test_a_run_that_is_elsewhere_needs_an_address(tmp_path: Path) -> None:
    found = find_run("away", "head:6379", root=tmp_path)
    assert (found.name, found.folder, found.address) == ("away", None, "head:6379")
    for target, address in (("away", None), ("no/folder", "head:6379")):
        with pytest.raises(RunAccessError, match=rf"{target}: is not the folder of a run.*or --address"):
            find_run(target, address, root=tmp_path)


class Answers:
    """Controls that give one answer after another, the last one for ever."""

    def __init__(self, *answers: LiveStatus | Exception) -> None:
        self.answers = list(answers)

    async def status(self, run: str) -> LiveStatus:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> RunHandle:
    monkeypatch.setattr(run_handle, "POLL_SECONDS", 0.01)
    return RunHandle("away", None, "head:6379")


def answer(monkeypatch: pytest.MonkeyPatch, *answers: LiveStatus | Exception) -> None:
    monkeypatch.setattr(run_handle, "RayControls", lambda address: Answers(*answers))


def test_waiting_for_sizes(handle: RunHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = LiveStatus(live=True, note="1 generator starts")
    answer(monkeypatch, growing, growing, LiveStatus(live=True, generators=2))
    assert handle.wait_for_sizes(30).generators == 2
    answer(monkeypatch, growing)
    with pytest.raises(RunAccessError, match=r"away: after 0\.05 s still: 1 generator starts"):
        handle.wait_for_sizes(0.05)
    answer(monkeypatch, NotLive("away: is not alive"))
    with pytest.raises(NotLive):
        handle.wait_for_sizes(30)


def test_waiting_for_the_end(handle: RunHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = ControlFailed("away: its controller did not answer in 5 s")
    answer(monkeypatch, LiveStatus(live=True), saving, NotLive("away: is not alive"))
    assert handle.wait_for_end(30) is None
    for still in (LiveStatus(live=True), saving):
        answer(monkeypatch, still)
        with pytest.raises(RunAccessError, match=r"away: has not ended after 0\.05 s"):
            handle.wait_for_end(0.05)
