"""Starting vLLM on a card that engines share: one after the other, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import card_lock, worker_calls

HOLDER = """
import sys
import threading
from pods_cluster.generation.engines.vllm.card_lock import start_lock
with start_lock(60):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock until its input ends; locks lie in a folder of this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait(30)


def test_a_start_that_hangs_is_named_with_its_process_and_the_fix(holder: subprocess.Popen[str]) -> None:
    with (
        pytest.raises(
            EngineError,
            match=rf"(?s)process {holder.pid} has been starting.*-3\.lock.*80% may pass here.*engine_options\.kv_cache_gb",
        ),
        card_lock.start_lock(0.1),
    ):
        raise AssertionError("it had the lock")


def test_the_next_start_goes_on_when_the_first_one_ends(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    with card_lock.start_lock(60):
        pass
    with card_lock.start_lock(0):  # given back
        pass


def test_a_killed_start_leaves_no_lock(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with card_lock.start_lock(60):
        pass


class SilentCore:
    """Workers with processes of their own, one of which never answers."""

    process = True

    def __init__(self) -> None:
        self.gate = threading.Event()

    def call_workers(self, method: str, *_: object) -> list[object]:
        self.gate.wait(60)
        raise RuntimeError(method)


def test_workers_that_do_not_answer_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(worker_calls, "FINGERPRINT_SECONDS", 0.1)
    core = SilentCore()
    weights = worker_calls.WorkerWeights(core, native=False)  # type: ignore[arg-type]
    try:
        with pytest.raises(EngineError, match=r"fingerprints: vLLM: pods_fingerprints"):
            weights.fingerprints()
    finally:
        core.gate.set()
