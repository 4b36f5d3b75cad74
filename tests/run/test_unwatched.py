"""Observability never stops training: full disks, hanging sinks and a dashboard that dies cost lines, not steps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pods_cluster.run import step_assembly
from pods_cluster.telemetry import sink_queue
from pods_cluster.telemetry.recorder import Recorder
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_assembly, "POLL_SECONDS", 0.01)


def with_files_on_a_full_disk(loop: Loop) -> None:
    """The run's lines go to a device that never has room."""
    loop.recorder.close()
    for path in (loop.folder.metrics, loop.folder.events, loop.folder.samples, loop.folder.evals):
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")
    loop.recorder = loop.run.recorder = Recorder.for_run(loop.folder, strict=True)


def test_a_full_disk_costs_no_step_and_no_checkpoint(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=12", "run.samples_every=1", "run.checkpoint.every=6"), tmp_path)
    with_files_on_a_full_disk(loop)
    loop.main()
    assert loop.run.step == 12
    assert loop.trained_rows() == list(range(48))
    assert loop.publisher.published == list(range(13))
    told = [record for what, record in loop.recorder.poll().items if what == "step"]
    assert [record["step"] for record in told] == list(range(1, 13))
    assert any("No space left" in record["text"] for what, record in loop.recorder.poll().items if what == "event")


def test_lines_come_back_when_the_disk_has_room_again(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=6"), tmp_path)
    with_files_on_a_full_disk(loop)
    asyncio.run(loop.run.main())
    for path in (loop.folder.metrics, loop.folder.events):
        path.unlink()
    for writer in loop.recorder._sinks.sinks[0]._writers:  # type: ignore[attr-defined]
        if writer._descriptor is not None:  # the file that was opened lies on the full disk
            writer.close()
    loop.recorder.close()
    assert [record["step"] for record in loop.folder.read_metrics()] == list(range(1, 7))


class Hangs:
    """A sink that never returns from its first step."""

    name = "hangs"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write_step(self, record: Any) -> None:
        self.release.wait(60)

    def write_event(self, event: Any) -> None: ...

    def write_samples(self, groups: Any) -> None: ...

    def write_evals(self, rows: Any) -> None: ...

    def retry(self) -> None: ...

    def close(self) -> None: ...


def test_a_sink_that_hangs_holds_no_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_queue, "QUEUED_ITEMS", 8)
    loop = Loop(loop_config("run.steps=30"), tmp_path)
    loop.recorder.close()
    sink = Hangs()
    loop.recorder = loop.run.recorder = Recorder([sink], strict=True)
    try:
        asyncio.run(loop.run.main())
        assert loop.run.step == 30
        assert loop.recorder.dropped > 0
        loop.recorder.close(timeout=0.1)
    finally:
        sink.release.set()


@contextlib.contextmanager
def dashboard(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = (
        "import sys; from pods_cluster.dashboard.server import serve; "
        "serve([sys.argv[1]], port=0, say=lambda text: None, ready=lambda url: print(url, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def silent_page(url: str, run: str) -> socket.socket:
    """Asks for the run's events and never reads one."""
    place = urlsplit(url)
    page = socket.create_connection((place.hostname, place.port), timeout=30)
    page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    page.sendall(f"GET /api/stream?run={run} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
    assert page.recv(12) == b"HTTP/1.1 200"
    return page


def test_pages_that_never_read_and_a_killed_dashboard_change_nothing(tmp_path: Path) -> None:
    loop = Loop(loop_config("run.steps=40", "run.samples_every=1"), tmp_path)
    with dashboard(tmp_path) as (process, url), contextlib.ExitStack() as pages:
        for _ in range(10):
            pages.enter_context(contextlib.closing(silent_page(url, "loop")))
        train = loop.learners.train

        async def train_and_kill(selections: Any, step: int) -> Any:
            if step == 20:
                assert process.poll() is None
                process.kill()
                process.wait(30)
            return await train(selections, step)

        loop.learners.train = train_and_kill  # type: ignore[method-assign]
        loop.main()
    assert loop.trained_rows() == list(range(160))
    assert [record["step"] for record in loop.folder.read_metrics()] == list(range(1, 41))
    assert not [event for event in loop.folder.read_events() if event["level"] == "error"]
