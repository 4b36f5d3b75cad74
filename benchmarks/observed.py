"""What being looked at costs a run: steps a second of a paced run on the CPU, alone and observed.

    python -m benchmarks.observed [--steps 40] [--rounds 3] [--clients 200] [--out benchmarks/results/observed.json]

One pool of real worker actors with the paced engine (see `benchmarks/paced.py`) runs the same configuration again and
again, with a real run folder and recorder. Four ways in turn: alone; with a dashboard of its own process and so many
pages that follow the run by server-sent events, a tenth of which never read what they get; with a dashboard that is
killed half-way; and with a full disk under metrics, events and samples. Ratios are medians over the rounds, each
against the run alone of its round (target: at least 0.95).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import httpx
import psutil
import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.paced import PacedLearners, PacedPublisher, Pools, Records, make_files, paced_config
from pods_cluster.config import dump_config
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder

ENGINE = {"tokens_per_second": 20000.0, "shortest": 1, "longest": 128, "accuracy": 0.5, "reward_token": 5}
WAYS = ("alone", "observed", "killed", "disk_full")
SILENT_SHARE = 0.1


class Written(Records):
    """Keeps the records, and hands them to a run folder's recorder as a run does."""

    def __init__(self, recorder: Recorder, after_step: Callable[[int], None]) -> None:
        super().__init__()
        self._recorder, self._after_step = recorder, after_step

    def step(self, step: int, values: dict[str, float]) -> None:
        super().step(step, values)
        self._recorder.step(step, values)
        self._after_step(step)

    def event(self, kind: str, text: str, **more: Any) -> None:
        self._recorder.event(kind, text, **more)


@contextlib.contextmanager
def dashboard(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server of its own, in a process of its own."""
    code = (
        "import sys; from pods_cluster.dashboard.server import serve; "
        "serve([sys.argv[1]], port=0, say=lambda text: None, ready=lambda url: print(url, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rstrip("/"), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(30)


@contextlib.contextmanager
def clients(url: str, run: str, count: int) -> Iterator[Callable[[], dict[str, int]]]:
    """Pages in a process of their own; the callable says what they heard so far."""
    command = [sys.executable, "-m", "benchmarks.observed", "--follow", url, run, "--clients", str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def heard() -> dict[str, int]:
        stdin.write("\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        assert json.loads(stdout.readline())["connected"] == count
        yield heard
    finally:
        process.kill()
        process.wait(30)


async def follow(url: str, run: str, count: int) -> None:
    """The pages' process: connects all, says so, and answers each line of its input with what was heard."""
    heard = {"connected": 0, "reading": 0, "updates": 0, "steps": 0, "ended": 0}
    silent = int(count * SILENT_SHARE)

    async def page(client: httpx.AsyncClient, reads: bool) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("GET", f"{url}/api/stream", params={"run": run}) as response:
                response.raise_for_status()
                heard["connected"] += 1
                heard["reading"] += reads
                if not reads:
                    await asyncio.Event().wait()
                async for text in response.aiter_lines():
                    if text.startswith("data: ") and '"rows"' in text:
                        heard["updates"] += 1
                        heard["steps"] += len(json.loads(text.removeprefix("data: "))["rows"])
        heard["ended"] += 1

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=count + 1)) as client:
        tasks = [asyncio.create_task(page(client, place >= silent)) for place in range(count)]
        while heard["connected"] < count and heard["ended"] == 0:
            await asyncio.sleep(0.05)
        print(json.dumps(heard), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(heard), flush=True)
        for task in tasks:
            task.cancel()


async def measure(folder: Path, steps: int, rounds: int, count: int) -> dict[str, Any]:
    make_files(folder)
    config = paced_config(folder, {"rollouts_per_prompt": 16, "engine_options": ENGINE}, run={"steps": steps})
    pools = Pools(config)
    await pools.start(1)
    await pools.arm(config, PacedLearners(seconds=0.1), PacedPublisher())  # everything is warm after it
    found: list[dict[str, dict[str, Any]]] = []
    for turn in range(rounds):
        found.append({})
        for way in WAYS:
            root = folder / f"{way}-{turn}"
            found[-1][way] = await _one(pools, config, root, way, count)
            print(f"round {turn + 1}, {way}: {found[-1][way]}", flush=True)
    await pools.close()
    ratios = {
        way: statistics.median(turn[way]["steps_per_second"] / turn["alone"]["steps_per_second"] for turn in found)
        for way in WAYS[1:]
    }
    return {"ratios": {way: round(ratio, 4) for way, ratio in ratios.items()}, "rounds": found}


async def _one(pools: Pools, config: Any, root: Path, way: str, count: int) -> dict[str, Any]:
    folder = RunFolder.create(root, config.run.name, dump_config(config))
    if way == "disk_full":
        for path in (folder.metrics, folder.events, folder.samples):
            path.symlink_to("/dev/full")
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(Recorder.for_run(folder, strict=True))
        process: psutil.Process | None = None
        heard: Callable[[], dict[str, int]] | None = None
        if way in ("observed", "killed"):
            url, process = stack.enter_context(dashboard(root))
            heard = stack.enter_context(clients(url, config.run.name, count))

        def after_step(step: int) -> None:
            if way == "killed" and step == config.run.steps // 2 and process is not None:
                process.kill()

        before = None if process is None else process.cpu_times()
        arm = await pools.arm(config, PacedLearners(seconds=0.1), PacedPublisher(), Written(recorder, after_step))
        result["steps_per_second"] = round(arm.steps_per_second(), 4)
        result["steps"] = len(arm.steps)
        if way == "observed" and process is not None and before is not None and heard is not None:
            after = process.cpu_times()
            result["dashboard_cpu_s"] = round(after.user + after.system - before.user - before.system, 2)
            result["dashboard_rss_mb"] = round(process.memory_info().rss / 1e6)
            await asyncio.sleep(1.0)
            result["pages"] = heard()
    if way == "disk_full":
        result["on_disk"] = len(folder.read_metrics()) if folder.metrics.is_file() else 0
        result["failed_writes"] = recorder._health().get("telemetry/failed_writes", 0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--follow", nargs=2, metavar=("URL", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        url, run = arguments.follow
        asyncio.run(follow(url, run, arguments.clients))
        return
    begun = time.monotonic()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(measure(Path(folder), arguments.steps, arguments.rounds, arguments.clients))
    finally:
        ray.shutdown()
    result = {
        "machine": machine(),
        "clients": arguments.clients,
        "silent_clients": int(arguments.clients * SILENT_SHARE),
        "steps": arguments.steps,
        "seconds": round(time.monotonic() - begun),
        **result,
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
