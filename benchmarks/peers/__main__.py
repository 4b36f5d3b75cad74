"""This project and TRL on one card in turn: one table, and a result that is written as each arm ends.

    pip install -r benchmarks/peers/requirements.txt
    python -m benchmarks.peers --model MODEL --data GSM8K --out benchmarks/results/peers_x.json
    python -m benchmarks.peers --model MODEL --data GSM8K --out result.json --arms ours-16-sync trl-16 --seconds 60

Every arm is a process of its own with a deadline; one that fails is told with its cause, and the others go on. MODEL is a
folder; GSM8K a folder with `train.jsonl` and `test.jsonl`. README.md beside this file says what is compared and how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.peers import ours_arm
from benchmarks.peers.arms import ARMS, ONE_CARD, Arm, Settings
from benchmarks.peers.card import CardWatch
from benchmarks.peers.summary import WARM, ratios, render_table, summarize
from pods_cluster.telemetry.jsonl import read_lines

CONFIG = Path("configs/gsm8k-1gpu.yaml")
FREE_GB = 4.0
"""The card counts as free below this; waited for between two arms."""
FREE_SECONDS = 60.0
KILL_SECONDS = 15.0
ERROR_LETTERS = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG, help="of ours")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ONE_CARD, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seconds", type=float, help="seconds of steps, in place of each arm's own")
    parser.add_argument("--deadline", type=float, help="seconds until an arm is ended, its start included")
    parser.add_argument("--server", help="address of the vLLM server that arms in server mode generate with")
    parser.add_argument("--evaluate", type=int, help="steps between evaluations, in place of each arm's own; 0: none")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="more of the configuration of ours")
    parser.add_argument("--target", type=float, default=0.30, help="held-out greedy accuracy whose time is taken")
    parser.add_argument("--append", action="store_true", help="keep the arms that --out has")
    parser.add_argument("--work", type=Path, help="where the arms' files are kept; else a folder that is removed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try this script out")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--held-out", type=int, help="rows of an evaluation; else all")
    options = parser.parse_args()
    settings = Settings(
        model=os.path.abspath(options.model),
        data=os.path.abspath(options.data),
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        device=options.device,
        server=options.server,
        held_out=options.held_out,
    )
    if (unserved := [name for name in options.arms if ARMS[name].serves]) and not options.server:
        parser.error(f"--server: {', '.join(unserved)} generate with a vLLM server; README.md says how to start it")
    more = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in options.set)}
    result: dict[str, Any] = {
        "benchmark": "peers",
        "machine": machine() | {"peers": _versions(("trl", "accelerate", "datasets"))},
        "settings": {"model": Path(settings.model).name, "config": options.config.name, "set": more}
        | {
            name: getattr(settings, name) for name in ("prompts", "max_tokens", "learning_rate", "warmup_steps", "seed")
        },
        "target": options.target,
        "warm_steps_left_out": WARM,
        "arms": [],
    }
    if options.append and options.out.exists():
        result["arms"] = json.loads(options.out.read_text(encoding="utf-8"))["arms"]
    with _work(options.work) as work:
        for name in options.arms:
            arm = ARMS[name]
            if options.seconds:
                arm = replace(arm, seconds=options.seconds)
            if options.evaluate is not None:
                arm = replace(arm, evaluate=options.evaluate)
            if arm.peer == "ours":
                arm = replace(arm, options=more | arm.options)
            result["arms"].append(measure(arm, settings, options.config, work / name, options.target, options.deadline))
            result["times_trl"] = ratios(result["arms"])
            write_result(options.out, result)
            _tell(result["arms"][-1])
    print(render_table(result))
    print("TRL's seconds a step over ours, at the same n:", json.dumps(result["times_trl"]))


def measure(
    arm: Arm, settings: Settings, config: Path, out: Path, target: float, deadline: float | None = None
) -> dict[str, Any]:
    """Run one arm to its end or its deadline. Whatever steps it made count."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.time()
    watch = CardWatch(every=arm.serves or arm.name not in ONE_CARD)
    try:
        error = run_command(_command(arm, settings, config, out), out / "log.txt", deadline or arm.deadline())
        ended = time.time()
    finally:
        watch.stop()
    found = ours_arm.read(arm, out) if arm.peer == "ours" else _read(out)
    steps = found["steps"]
    entry = arm.plain() | {"status": "failed" if error else "done"} | ({"error": error} if error else {})
    entry |= summarize(steps, found["evals"], target) | found["end"]
    if steps:
        first = steps[0]["time"] - steps[0]["seconds"]
        entry |= {"start_seconds": round(first - began, 1), "wall_seconds": round(ended - began, 1)}
        if card := watch.over(steps[min(WARM, len(steps) - 1)]["time"], steps[-1]["time"]):
            entry["card"] = card
    _wait_for_the_card()
    return entry


def run_command(command: list[str], log: Path, deadline: float) -> str | None:
    """Run it with its output in `log`. None, or what went wrong: its exit status and last lines, or the deadline.

    Whatever it started is ended with it.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    children: dict[int, psutil.Process] = {}
    until = time.monotonic() + deadline
    late = False
    while process.poll() is None and not late:
        with contextlib.suppress(psutil.Error):
            children |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        late = time.monotonic() > until
        time.sleep(0.5)
    if late:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_SECONDS)
    left = [child for child in children.values() if child.is_running()]  # pids that were used again do not count
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(left, KILL_SECONDS)
    if not late and process.returncode == 0:
        return None
    end = log.read_text(encoding="utf-8", errors="replace").strip()[-ERROR_LETTERS:]
    cause = f"not done after {deadline:.0f} s" if late else f"exit status {process.returncode}"
    return f"{cause}; its output ends with: {end}"


def _command(arm: Arm, settings: Settings, config: Path, out: Path) -> list[str]:
    if arm.peer == "ours":
        return ours_arm.command(arm, settings, config, out)
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


def _wait_for_the_card() -> None:
    """Wait until the arm's memory is given back, so that the next one finds the card empty."""
    watch = CardWatch()
    until = time.monotonic() + FREE_SECONDS
    try:
        while time.monotonic() < until:
            time.sleep(1)
            used = watch.used_gb()
            if used is None or used < FREE_GB:
                return
        print(f"the card still holds {watch.used_gb():.1f} GB; the next arm starts all the same", flush=True)
    finally:
        watch.stop()


def _tell(entry: Mapping[str, Any]) -> None:
    left_out = ("curve", "evaluations", "options")
    print(json.dumps({key: value for key, value in entry.items() if key not in left_out}), flush=True)


@contextlib.contextmanager
def _work(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="peers-") as made:
        yield Path(made)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


if __name__ == "__main__":
    main()
