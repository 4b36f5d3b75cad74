"""The server that an arm starts for itself: its cards and cores, its end, and an arm whose server dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._run_processes import lives
from benchmarks.peers.arms import ARMS, START_SECONDS, Settings
from benchmarks.peers.card import CardWatch, visible_cards
from benchmarks.peers.measure import measure
from benchmarks.peers.processes import run_command
from benchmarks.peers.server import serving

ROOT = Path(__file__).parents[2]
LONG = 60.0
"""Seconds until a wait is given up; none takes as long."""
ABOUT = """
import json, os
def about():
    return {
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "card": os.environ["CUDA_VISIBLE_DEVICES"],
        "host": os.environ["VLLM_HOST_IP"],
    }
"""
SERVER = (
    ABOUT
    + """
import http.server, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's: it outlives the server
print("serving", sys.argv[1], flush=True)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(about() | {"pids": [os.getpid(), engine.pid]}).encode())
        if self.path == "/crash":
            self.wfile.flush()
            print("the card fell off the bus", flush=True)
            os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Page).serve_forever()
"""
)
TRAINER = (
    ABOUT
    + """
import sys, time, urllib.request
until = time.monotonic() + 60
while True:
    try:
        page = urllib.request.urlopen(sys.argv[1] + "/health", timeout=60).read()
        break
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.1)
print(json.dumps({"server": json.loads(page), "trainer": about()}), flush=True)
if sys.argv[4]:
    urllib.request.urlopen(sys.argv[1] + sys.argv[4], timeout=60)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""
)


def stand_in(model: str, port: int) -> list[str]:
    """In place of vLLM: answers every request with what it sees of the machine."""
    return [sys.executable, "-c", SERVER, model, str(port)]


def train(folder: Path, sleep: float = 0, status: int = 0, then: str = "") -> tuple[str | None, dict[str, Any]]:
    """A trainer beside its server, which it asks for a page and `then` for another: what went wrong, and what both saw."""
    with serving("some/model", ["5", "GPU-8932f937"], folder / "server.txt", stand_in) as server:
        command = server.beside([sys.executable, "-c", TRAINER, server.address, str(sleep), str(status), then])
        error = run_command(command, folder / "log.txt", LONG, server.environment, server.process)
    return error, json.loads((folder / "log.txt").read_text().splitlines()[0])


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and lives(psutil.Process(pid)) for pid in pids)


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + LONG
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
    return found


def test_the_server_has_the_first_card_and_half_of_the_cores_and_ends_with_its_children(tmp_path: Path) -> None:
    error, saw = train(tmp_path)
    assert error is None
    assert (saw["server"]["card"], saw["trainer"]["card"]) == ("5", "GPU-8932f937")
    assert saw["server"]["host"] == saw["trainer"]["host"] == "127.0.0.1"
    if hasattr(os, "sched_getaffinity") and len(own := os.sched_getaffinity(0)) > 1:
        theirs = [set(saw[who]["cores"]) for who in ("server", "trainer")]
        assert theirs[0] | theirs[1] == own
        assert not theirs[0] & theirs[1]
        assert len(theirs[0]) == len(own) // 2
    assert gone(saw["server"]["pids"])
    assert "serving some/model" in (tmp_path / "server.txt").read_text()


def test_a_server_ends_with_its_children_when_the_trainer_fails(tmp_path: Path) -> None:
    error, saw = train(tmp_path, status=4)
    assert error is not None
    assert error.startswith("exit status 4 (the server runs; its output ends with: serving some/model")
    assert gone(saw["server"]["pids"])


def test_a_server_that_dies_in_the_arm_ends_it_with_the_servers_last_lines(tmp_path: Path) -> None:
    error, saw = train(tmp_path, sleep=600, then="/crash")
    assert error is not None
    assert error.startswith("the server ended before the arm, with exit status 3; its output ends with: ")
    assert error.endswith("the card fell off the bus")
    assert gone(saw["server"]["pids"])


def test_a_server_that_does_not_start_fails_its_arm_at_once(tmp_path: Path) -> None:
    def refuse(model: str, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no memory left on the card')"]

    settings = Settings(model="some/model", data=str(tmp_path))
    entry = measure(ARMS["trl-16-server"], settings, tmp_path / "arm", 0.3, cards=["0", "1"], serve=refuse)
    assert entry["status"] == "failed"
    assert entry["error"].startswith("the server ended before the arm, with exit status 1;")
    assert entry["error"].endswith("no memory left on the card")
    given = json.loads((tmp_path / "arm" / "arm.json").read_text())
    assert given["settings"]["server"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_arm_and_its_server(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from tests.analysis.test_peers_server import train; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); train(Path(sys.argv[1]), sleep=600)"
    )
    log = tmp_path / "log.txt"
    outer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        line = wait_for(lambda: log.exists() and log.read_text())
        below = [child.pid for child in psutil.Process(outer.pid).children(recursive=True)]
        assert set(json.loads(line)["server"]["pids"]) < set(below)
        outer.send_signal(number)
        outer.wait(LONG)
        assert gone(below)
    finally:
        outer.kill()


def test_the_deadline_of_a_serving_arm_has_room_for_the_servers_start() -> None:
    for arm in ARMS.values():
        if arm.serves:
            assert arm.deadline() - arm.seconds > arm.options["vllm_server_timeout"] + START_SECONDS / 4


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """A stand-in on the path that prints these lines."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'EOF'\n{lines}\nEOF\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_visible_cards_are_those_of_the_environment_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "0\n1\n2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_cards() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8932f937")
    assert visible_cards() == ["3", "GPU-8932f937"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_cards() == []


def test_only_the_cards_of_an_arm_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "0, GPU-aaaa1, 1000, 10\n1, GPU-bbbb2, 2000, 20\n2, GPU-cccc3, [N/A], 30\n3, GPU-dddd4, 4000, 40"
    nvidia_smi(tmp_path, monkeypatch, rows)
    for cards, seen in ((["1", "GPU-dddd"], {1, 3}), ([], {0, 1, 3}), (["MIG-1"], {0, 1, 3})):
        watch = CardWatch(cards)
        try:
            wait_for(lambda watch=watch: 3 in watch.samples)
            assert set(watch.samples) == seen
        finally:
            watch.stop()
