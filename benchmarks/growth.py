"""Steps a second against the number of generators, from 1 to 16, on pools that keep time: linear up to the learner's bound?

    python -m benchmarks.growth [--generators 1 2 4 8 12 16] [--out benchmarks/results/growth.json]

Workers, scorers, selector, controller loop and the way of rollouts to the learner are the real ones; tokens and the update
are slept for (`benchmarks/paced.py`). The update takes as long as eight generators take for a step's rollouts, staleness is
1. Each row says what was made of the ideal, the lower of the generators' and the learner's pace, and where a step's
seconds went: `between` is what lies between the end of a step's clock and the next step. The processes of sixteen workers
want more than two cores: the file names the load.
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

import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.paced import PacedLearners, PacedPublisher, Pools, make_files, paced_config
from pods_cluster.config import Config

RESULT = Path(__file__).parent / "results" / "growth.json"
RATE, MEAN = 500.0, 64.5
N, M, PROMPTS, MOST = 16, 4, 4, 8
TOKENS = PROMPTS * N * MEAN
UPDATE = TOKENS / (MOST * RATE)
PUBLISH = 0.05
BOUND = 1.0 / (UPDATE + PUBLISH)
STAGES = ("wait", "generate", "fetch", "update", "publish", "scale")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="about so long for each number; at least five steps"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    started = machine()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_files(Path(folder))
            rows = asyncio.run(measure(Path(folder), sorted(options.generators), options.seconds))
    finally:
        ray.shutdown()
    settings = {"tokens_per_second": RATE, "n": N, "m": M, "prompts": PROMPTS, "staleness": 1}
    settings |= {"update_seconds": UPDATE, "learner_bound_steps_per_second": BOUND}
    write_result(options.out, {"machine": started, "settings": settings, "rows": rows})


async def measure(folder: Path, counts: list[int], seconds: float) -> list[dict[str, Any]]:
    pools = Pools(config_of(folder, 5))
    rows: list[dict[str, Any]] = []
    try:
        for count in counts:
            await pools.start(count)
            ideal = min(BOUND, count * RATE / TOKENS)
            config = config_of(folder, max(5, 2 + round(seconds * ideal)))
            cpu = time.process_time()
            arm = await pools.arm(config, PacedLearners(UPDATE), PacedPublisher(PUBLISH))
            pace = arm.steps_per_second()
            row = {
                "generators": count,
                "steps_per_second": pace,
                "ideal": ideal,
                "share_of_ideal": pace / ideal,
                "generator_idle": arm.mean("generator/idle_share"),
                "learner_idle": arm.mean("learner/idle_share"),
                "seconds": {stage: arm.mean(f"timing_s/{stage}") for stage in STAGES}
                | {"step": arm.mean("timing_s/step"), "between": 1.0 / pace - arm.mean("timing_s/step")},
                "controller_cpu_share": (time.process_time() - cpu) * pace / len(arm.steps),
                "load_1min": round(os.getloadavg()[0], 1),
            }
            rows.append(row)
            print(row, flush=True)
    finally:
        await pools.close()
    return rows


def config_of(folder: Path, steps: int) -> Config:
    return paced_config(
        folder,
        {
            "rollouts_per_prompt": N,
            "max_sequences": 32,
            "engine_options": {"tokens_per_second": RATE, "reward_token": 5},
        },
        selector={"keep": M},
        learner={"prompts_per_step": PROMPTS},
        staleness=1,
        run={"steps": steps},
    )


if __name__ == "__main__":
    main()
