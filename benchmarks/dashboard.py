"""How the dashboard bears a long run and many pages.

python benchmarks/dashboard.py --steps 100000 --out benchmarks/results/dashboard.json

Writes a run of that many steps (about 2 kB a line), then measures on it, each in a server process of its own:
seconds to the data that the first page shows, cold; seconds until all steps are read; resident memory of the server;
seconds from a line's writing to a page's hearing of it; the same while 200 pages listen; and, where Chromium and
Playwright are there, seconds until the page in the browser shows its tiles and its first curve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from _machine import machine
from _result_file import write_result

STAGES = ("generate", "score", "select", "fetch", "update", "publish", "eval", "checkpoint")
METRICS = (
    "rollout_to_update_ratio", "rollout_to_update_ratio/cumulative", "reward", "reward/kept", "eval/greedy_accuracy",
    "eval/sampled_accuracy", "throughput/rollouts_generated", "throughput/rollouts_selected",
    "throughput/rollouts_trained", "completions/mean_length", "completions/kept_mean_length", "generator/idle_share",
    "learner/idle_share", "loss", "mismatch_kl", "staleness/mean", "staleness/max", "weights/sync_seconds",
    *(f"timing_s/{stage}" for stage in STAGES),
    *(f"groups/{fate}" for fate in ("trained", "no_signal", "stale", "lost")),
)  # fmt: skip
"""What the first view draws."""
RUN = "long"


def line(step: int) -> bytes:
    """One step as a run writes it: the registry's metrics, plausible sizes."""
    wave = (step * 2654435761 % 1000) / 1000
    values: dict[str, Any] = {"step": step, "time": 1_700_000_000 + 3.2 * step, "elapsed": 3.2 * step}
    values |= {
        name: round(0.5 + 0.3 * wave + index / 97, 9) for index, name in enumerate(METRICS) if "eval" not in name
    }
    values |= {f"sampling/other_{index}": round(wave / (index + 1), 9) for index in range(35)}
    values |= {"rollouts/generated": 1024, "rollouts/scored": 1020, "rollouts/trained": 256, "rollouts/selected": 256,
               "tokens/sampled": 400_000, "tokens/trained": 100_000, "timing_s/step": 3.2, "updates": 1}  # fmt: skip
    if step % 10 == 0:
        values |= {"eval/greedy_accuracy": wave, "eval/sampled_accuracy": wave / 2}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def write_run(root: Path, steps: int) -> Path:
    folder = root / RUN
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run:\n  name: {RUN}\n  steps: {steps}\n")
    with (folder / "metrics.jsonl").open("wb", buffering=1 << 20) as file:
        for step in range(1, steps + 1):
            file.write(line(step))
    with (folder / "events.jsonl").open("w") as file:
        for step in range(20, steps + 1, 20):
            file.write(json.dumps({"time": 1.7e9 + step, "elapsed": 3.2 * step, "step": step, "kind": "checkpoint",
                                   "level": "info", "text": f"saved step-{step:06d}"}) + "\n")  # fmt: skip
    rollouts = [{"index": index, "kept": index < 4, "reward": index % 2, "parts": {"math": index % 2}, "length": 400,
                 "finish_reason": "stop", "versions": [1, 1], "text": "so " * 400} for index in range(16)]  # fmt: skip
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(50, steps + 1, 50):
            file.write(json.dumps({"step": step, "time": 1.7e9, "elapsed": 1.0, "group": f"0.{step}.0", "prompt": "?",
                                   "answer": "4", "fate": "trained", "rule": "max_variance", "reason": "",
                                   "rollouts": rollouts}) + "\n")  # fmt: skip
    return folder


@contextlib.contextmanager
def server(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    code = (
        "import sys; from pathlib import Path; from pods_cluster.dashboard.server import serve; "
        "serve([sys.argv[1]], port=0, ready=lambda url: print(url, flush=True), say=lambda text: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rstrip("/")
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/healthz", timeout=10).raise_for_status()
                break
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def page_data(url: str) -> float:
    """Seconds to everything that the first view asks for, one request after another."""
    started = time.perf_counter()
    with httpx.Client(timeout=120) as client:
        run = f"/api/runs/{RUN}"
        files = ("/", "/static/app.js", "/static/plotly-basic.min.js")
        for path in (*files, "/api/runs", run, f"{run}/config", f"{run}/events?limit=10"):
            client.get(url + path).raise_for_status()
        client.get(f"{url}/api/runs/{RUN}/series", params={"metric": METRICS, "points": 700}).raise_for_status()
    return time.perf_counter() - started


def until_read(url: str) -> float:
    started = time.perf_counter()
    while httpx.get(f"{url}/api/runs/{RUN}", timeout=60).json()["progress"] < 1:
        time.sleep(2)
    return time.perf_counter() - started


def browser_seconds(url: str) -> dict[str, float] | None:
    """Seconds from the address to the numbers and to the first drawn curve, and what the page's thread worked for it
    (other work on the machine left out); None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if (chromium := shutil.which("chromium")) is None:
        return None
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(url, wait_until="commit")
        page.wait_for_selector(".js-plotly-plot .scatterlayer .trace", timeout=120_000)
        times = page.evaluate(
            "['pods:numbers', 'pods:curve'].map((name) => performance.getEntriesByName(name)[0].startTime)"
        )
        metrics = {item["name"]: item["value"] for item in devtools.send("Performance.getMetrics")["metrics"]}
        browser.close()
    return {
        "numbers_s": round(times[0] / 1000, 3),
        "first_curve_s": round(times[1] / 1000, 3),
        "main_thread_cpu_s": round(metrics["TaskDuration"], 3),
    }


async def latencies(url: str, folder: Path, pages: int, steps: int, first: int) -> dict[str, float]:
    """Seconds from a line's writing to each page's hearing of it."""
    heard: list[float] = []
    written: dict[int, float] = {}
    ready = asyncio.Semaphore(0)

    async def listen(client: httpx.AsyncClient) -> None:
        wanted = set(range(first, first + steps))
        async with client.stream("GET", f"{url}/api/stream", params={"run": RUN}) as response:
            response.raise_for_status()
            async for text in response.aiter_lines():
                if text.startswith("event: hello"):
                    ready.release()
                if not text.startswith("data: ") or '"rows"' not in text:
                    continue
                now = time.perf_counter()
                for row in json.loads(text.removeprefix("data: "))["rows"]:
                    if row["step"] in wanted:
                        wanted.discard(row["step"])
                        heard.append(now - written[row["step"]])
                if not wanted:
                    return

    limits = httpx.Limits(max_connections=pages + 1)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(listen(client)) for _ in range(pages)]
        for _ in range(pages):
            await ready.acquire()
        with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
            for step in range(first, first + steps):
                written[step] = time.perf_counter()
                file.write(line(step))
                await asyncio.sleep(0.5)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return {
        "pages": pages,
        "heard": len(heard),
        "median_s": round(statistics.median(heard), 3),
        "p99_s": round(sorted(heard)[int(0.99 * (len(heard) - 1))], 3),
        "max_s": round(max(heard), 3),
    }


def measure(root: Path, steps: int, pages: int) -> dict[str, Any]:
    begun = time.perf_counter()
    folder = write_run(root, steps)
    results: dict[str, Any] = {
        "machine": machine(),
        "steps": steps,
        "metrics_bytes": (folder / "metrics.jsonl").stat().st_size,
        "written_s": round(time.perf_counter() - begun, 1),
    }
    with server(root) as (url, process):
        results["empty_rss_mb"] = round(process.memory_info().rss / 1e6)
        results["cold_page_data_s"] = round(page_data(url), 3)
        results["all_steps_read_s"] = round(until_read(url), 2)
        results["reading_cpu_s"] = round(sum(process.cpu_times()[:2]), 2)
        results["warm_page_data_s"] = round(min(page_data(url) for _ in range(3)), 3)
        results["one_page"] = asyncio.run(latencies(url, folder, 1, 10, steps + 1))
        before = process.cpu_times()
        results["many_pages"] = asyncio.run(latencies(url, folder, pages, 20, steps + 11))
        after = process.cpu_times()
        results["many_pages"]["server_cpu_s"] = round(after.user + after.system - before.user - before.system, 2)
        results["rss_mb"] = round(process.memory_info().rss / 1e6)
        results["browser_warm"] = browser_seconds(url)
    with server(root) as (url, process):
        results["browser_cold"] = browser_seconds(url)
    results["load_1min_after"] = round(os.getloadavg()[0], 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments.steps, arguments.pages)
    print(json.dumps(results, indent=2))
    if arguments.out:
        write_result(arguments.out, results)


if __name__ == "__main__":
    main()
