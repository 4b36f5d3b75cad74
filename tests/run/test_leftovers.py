"""What a killed run leaves of its Ray cluster is ended by the next start; what belongs to a living one is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks._faulted_run import FaultedRun
from benchmarks._run_processes import lives
from pods_cluster.run import leftovers
from tests.client.test_recovery import config_settings
from tests.tiny_run import Made

HOLD = "import sys, time; file = open(sys.argv[1], 'a'); print('open', flush=True); time.sleep(600)"
"""A process that has a log of its session open, as each of Ray's has."""
NOTE = """
import sys
from pathlib import Path
from pods_cluster.run.leftovers import note_session
note_session(Path(sys.argv[1]))
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    log = tmp_path / "session_1" / "logs" / "raylet.out"
    log.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(log)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_processes_of_a_session_end_once_its_owner_is_gone(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    session = tmp_path / "session_1"
    mine = leftovers.note_session(session)
    assert leftovers.end_leftovers() == 0, "this process lives"
    assert holder.poll() is None
    leftovers.forget_session(mine)
    assert leftovers.end_leftovers() == 0, "nobody said that it is ours"
    subprocess.run([sys.executable, "-c", NOTE, str(session)], check=True)  # its process is gone after it
    assert leftovers.end_leftovers() == 1
    holder.wait(10)
    assert not psutil.pid_exists(holder.pid)
    assert leftovers.end_leftovers() == 0, "it is done once"


def test_a_note_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    note = leftovers.note_session(tmp_path / "session_2")
    note.write_text("{")
    assert leftovers.end_leftovers() == 0


@pytest.mark.slow  # a command with a Ray cluster of its own
def test_a_killed_command_leaves_nothing_after_the_next_start(
    cold: None, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets lie there, and their paths are bounded
        monkeypatch.setattr(leftovers.tempfile, "tempdir", short)
        monkeypatch.setenv("TMPDIR", short)
        _kill_and_start_again(made, tmp_path)


def _kill_and_start_again(made: Made, tmp_path: Path) -> None:
    settings = [item for item in config_settings(made, tmp_path) if not item.startswith("run.dir")]
    run = FaultedRun(tmp_path, "killed", settings)
    assert run.wait_for_step(2, 300), run.log.read_text()
    run.watch.sample()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    left = [each.process for each in run.watch.watched.values()]
    quiet_since, deadline = time.monotonic(), time.monotonic() + 60
    while time.monotonic() < min(quiet_since + 5, deadline):  # what ends by itself ends first
        alive = [process for process in left if lives(process)]
        if len(alive) < len(left):
            left, quiet_since = alive, time.monotonic()
        time.sleep(0.2)
    print("left by SIGKILL:", [process.name() for process in left])
    leftovers.end_leftovers()
    psutil.wait_procs(left, timeout=10)
    assert not [process for process in left if lives(process)]
