"""Steps a second against the number of generators, from 1 to 16, on pools that keep time: linear up to the learner's bound?

    python -m benchmarks.growth [--generators 1 2 4 8 16] [--staleness 1 2] [--out benchmarks/results/growth.json]

Workers, scorers, selector, controller loop and the way of rollouts to the learner are the real ones; tokens and the update
are slept for (`benchmarks/paced.py`). The update takes as long as eight generators take for a step's rollouts. Each row has
three paces: what was measured; the ideal, which is the lower of the generators' and the learner's; and what the same run
makes with a service that costs nothing (`modelled`, the simulation of `benchmarks/scale_model.py`), which is below the
ideal where staleness leaves engines without rollouts to begin. What is measured of `modelled` is the service's share.

A row also has the CPU seconds that each kind of process spends for a group, since a machine with few cores does not have
them for sixteen generators: `--flat-out` lets engines and learner take no time, so that only these seconds are left, and
shows how many groups a second go through. The file names the machine and its load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import psutil
import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks._run_processes import title_of
from benchmarks.paced import PacedLearners, PacedPublisher, Pools, Records, make_files, paced_config
from benchmarks.scale_inputs import EngineSpeed, Parts, Workload, uniform
from benchmarks.scale_model import simulate
from pods_cluster.config import Config

RESULT = Path(__file__).parent / "results" / "growth.json"
RATE, LONGEST = 1000.0, 128
N, M, PROMPTS, MOST, PLACES = 16, 4, 8, 8, 64
TOKENS = PROMPTS * N * (LONGEST + 1) / 2
UPDATE = TOKENS / (MOST * RATE)
PUBLISH = 0.05
BOUND = 1.0 / (UPDATE + PUBLISH)
STAGES = ("wait", "generate", "fetch", "update", "publish", "scale")
FAST = 1e6
"""Tokens a second of an engine that takes no time."""
KINDS = {
    "ray::SelectorActor": "selector",
    "ray::GeneratorWorker": "generator",
    "ray::_Forward": "benchmark",
    "raylet": "ray",
    "gcs_server": "ray",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--generators", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--flat-out", type=int, nargs="*", default=[2], help="generators of the rows without sleeps")
    parser.add_argument("--seconds", type=float, default=20.0, help="about so long for each row; at least six steps")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    result["settings"] = {"tokens_per_second": RATE, "n": N, "m": M, "prompts": PROMPTS, "update_seconds": UPDATE}
    result["settings"] |= {"publish_seconds": PUBLISH, "learner_bound_steps_per_second": BOUND}
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_files(Path(folder))
            asyncio.run(measure(Path(folder), options, result))
    finally:
        ray.shutdown()


async def measure(folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill in `flat_out` and `rows`; the file is written after each row."""
    for name, counts, rate in (("flat_out", options.flat_out, FAST), ("rows", options.generators, RATE)):
        rows: list[dict[str, Any]] = result.setdefault(name, [])
        pools = Pools(config_of(folder, 6, 1, rate))
        try:
            for count in sorted(counts):
                await pools.start(count)
                for staleness in options.staleness if rate == RATE else options.staleness[-1:]:
                    row = await measure_row(folder, pools, count, staleness, rate, options.seconds)
                    rows.append(row)
                    print(row, flush=True)
                    write_result(options.out, result)
        finally:
            await pools.close()


async def measure_row(
    folder: Path, pools: Pools, count: int, staleness: int, rate: float, seconds: float
) -> dict[str, Any]:
    paced = rate == RATE
    ideal = min(BOUND, count * RATE / TOKENS)
    config = config_of(folder, max(6, 2 + round(seconds * ideal)) if paced else 150, staleness, rate)
    cost = CpuSeconds(config.run.steps)
    arm = await pools.arm(
        config, PacedLearners(UPDATE if paced else 0.0), PacedPublisher(PUBLISH if paced else 0.0), cost
    )
    pace = arm.steps_per_second()
    row: dict[str, Any] = {"generators": count, "staleness": staleness, "steps_per_second": pace}
    if paced:
        modelled = model_pace(count, staleness)
        row |= {"ideal": ideal, "modelled": modelled, "share_of_ideal": pace / ideal}
        row |= {"share_of_modelled": pace / modelled}
        row |= {"generator_idle": arm.mean("generator/idle_share"), "learner_idle": arm.mean("learner/idle_share")}
    else:
        row["groups_per_second"] = pace * PROMPTS
    row["seconds"] = {stage: arm.mean(f"timing_s/{stage}") for stage in STAGES}
    row["seconds"] |= {"step": arm.mean("timing_s/step"), "between": 1.0 / pace - arm.mean("timing_s/step")}
    row["cpu_seconds_per_group"] = cost.per_group()
    row["cpu_share_of_a_core"] = {kind: spent * pace * PROMPTS for kind, spent in cost.per_group().items()}
    row["load_1min"] = round(os.getloadavg()[0], 1)
    return row


def model_pace(generators: int, staleness: int) -> float:
    """Steps a second of the same run, where the service itself takes no time."""
    work = Workload(
        generators=generators, prompts=PROMPTS, n=N, m=M, staleness=staleness, lengths=uniform(1, LONGEST), steps=60
    )
    parts = Parts(update=lambda rollouts, tokens: UPDATE, publish=PUBLISH)  # noqa: ARG005
    return 1.0 / simulate(work, EngineSpeed(0.0, 1.0 / RATE, PLACES), parts).seconds_per_step


class CpuSeconds(Records):
    """Step records, and the CPU seconds of the run's processes from the end of the second step to that of the last."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._last = steps
        self._marks: list[dict[str, float]] = []

    def step(self, step: int, values: dict[str, float]) -> None:
        super().step(step, values)
        if len(self.steps) in (2, self._last):
            self._marks.append(cpu_seconds())

    def per_group(self) -> dict[str, float]:
        first, last = self._marks
        groups = (self._last - 2) * PROMPTS
        return {kind: (last[kind] - first.get(kind, 0.0)) / groups for kind in last}


def cpu_seconds() -> dict[str, float]:
    """CPU seconds by kind of process so far: the controller's loop runs in this one."""
    found = {"controller": time.process_time()}
    for process in psutil.Process().children(recursive=True):
        title = title_of(process)
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        kind = next((kind for start, kind in KINDS.items() if start in title.split(" ", 1)[0]), None)
        if kind is None:
            kind = "scorer" if "pods_cluster" in title else None
        if kind is not None:
            found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def config_of(folder: Path, steps: int, staleness: int, rate: float) -> Config:
    return paced_config(
        folder,
        {
            "rollouts_per_prompt": N,
            "max_sequences": PLACES,
            "engine_options": {"tokens_per_second": rate, "longest": LONGEST, "reward_token": 5},
        },
        selector={"keep": M},
        learner={"prompts_per_step": PROMPTS},
        staleness=staleness,
        run={"steps": steps},
    )


if __name__ == "__main__":
    main()
