"""One run of one arm: its process, the server that it may need, and what its steps come to."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers import ours_arm
from benchmarks.peers.arms import Arm, Settings
from benchmarks.peers.card import CardWatch
from benchmarks.peers.processes import run_command
from benchmarks.peers.server import Serve, serving, trl_serve
from benchmarks.peers.summary import WARM, summarize
from pods_cluster.telemetry.jsonl import read_lines

FREE_GB = 4.0
"""The cards count as free below this; waited for between two arms."""
FREE_SECONDS = 60.0


def starts_server(arm: Arm, settings: Settings) -> bool:
    """Whether its server is started for it; on CPUs it does without one."""
    return arm.serves and settings.server is None and settings.device == "cuda"


def measure(
    arm: Arm,
    settings: Settings,
    out: Path,
    target: float,
    *,
    deadline: float | None = None,
    cards: Sequence[str] = (),
    serve: Serve = trl_serve,
) -> dict[str, Any]:
    """Run one arm to its end or its deadline. Whatever steps it made count.

    It sees as many of the `cards` as it uses, so that a trainer for one card does not spread over two. An interrupt (Ctrl-C,
    SIGTERM) ends the arm as its deadline does: its status is then `interrupted`, and the caller starts no other.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # A server that was started elsewhere has cards that are not known here: all are watched, and none is hidden.
    own = [] if arm.serves and settings.server else list(cards[: arm.cards])
    entry = arm.plain()
    began = time.time()
    watch = CardWatch(own)
    status = "done"
    try:
        error, more = _run(arm, settings, out, deadline or arm.deadline(), own, serve)
        if error:
            status = "failed"
    except (KeyboardInterrupt, SystemExit):
        status, error, more = "interrupted", "this command was interrupted", {}
    finally:
        ended = time.time()
        watch.stop()
    found = ours_arm.read(arm, out) if arm.peer == "ours" else _read(out)
    steps = found["steps"]
    entry |= {"status": status} | ({"error": error} if error else {}) | more
    entry |= summarize(steps, found["evals"], target) | found["end"]
    if steps:
        first = steps[0]["time"] - steps[0]["seconds"]
        entry |= {"start_seconds": round(first - began, 1), "wall_seconds": round(ended - began, 1)}
        if card := watch.over(steps[min(WARM, len(steps) - 1)]["time"], steps[-1]["time"]):
            entry["card"] = card
    if settings.device == "cuda" and status != "interrupted":
        _wait_for(own or cards[:1])
    return entry


def _run(
    arm: Arm, settings: Settings, out: Path, deadline: float, cards: Sequence[str], serve: Serve
) -> tuple[str | None, dict[str, Any]]:
    """What went wrong, if anything, and what the entry says of the server."""
    log = out / "log.txt"
    if not starts_server(arm, settings):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else None
        return run_command(_command(arm, settings, out), log, deadline, environment), {}
    with serving(settings.model, cards, out / "server.txt", serve) as server:
        command = server.beside(_command(arm, replace(settings, server=server.address), out))
        return run_command(command, log, deadline, server.environment, server.process), {"server": server.told()}


def _command(arm: Arm, settings: Settings, out: Path) -> list[str]:
    if arm.peer == "ours":
        return ours_arm.command(arm, settings, out)
    given = {"arm": arm.plain(), "settings": {name: getattr(settings, name) for name in Settings.__slots__}}
    (out / "arm.json").write_text(json.dumps(given), encoding="utf-8")
    return [sys.executable, "-m", "benchmarks.peers.trl_arm", str(out / "arm.json"), str(out)]


def _read(out: Path) -> dict[str, Any]:
    """What a peer's process wrote, as far as it came."""
    end = out / "end.json"
    return {
        "steps": list(read_lines(out / "steps.jsonl")),
        "evals": list(read_lines(out / "evals.jsonl")),
        "end": json.loads(end.read_text(encoding="utf-8")) if end.exists() else {},
    }


def _wait_for(cards: Sequence[str]) -> None:
    """Wait until the arm's memory is given back, so that the next one finds its cards empty."""
    watch = CardWatch(cards)
    until = time.monotonic() + FREE_SECONDS
    try:
        while time.monotonic() < until:
            time.sleep(1)
            used = watch.used_gb()
            if used is None or used < FREE_GB:
                return
        print(f"the cards still hold {watch.used_gb():.1f} GB; the next arm starts all the same", flush=True)
    finally:
        watch.stop()
