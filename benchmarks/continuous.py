"""The worth of issuing groups as engines have room, against once a step, on pools that keep time.

    python -m benchmarks.continuous [--rounds 2 --steps 9]

The engines are slower with few rollouts, as real ones are: one rollout makes at most 2.4 times what it makes in a full
engine (at 0.5B on an H200 it is about that), so batches drain. Generating a step's rollouts takes a full engine as long
as the update. Arms: staleness 1 and 2, without and with an evaluation of 48 prompts after every third step; each is run
both ways in turn, on the same two workers, and the rounds alternate. Writes `benchmarks/results/continuous.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.paced import Arm, PacedLearners, PacedPublisher, Pools, make_files, paced_config
from pods_cluster.config import Config
from pods_cluster.data import load_eval, load_tokenizer

RESULT = Path(__file__).parent / "results" / "continuous.json"
WORKERS, PLACES, RATE, SINGLE = 2, 64, 2000.0, 75.0
N, M, PROMPTS, MEAN = 16, 4, 8, 64.5
UPDATE = PROMPTS * N * MEAN / (WORKERS * RATE)
EVAL_ROWS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    started = machine()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_files(Path(folder))
            rows_out = [json.dumps({"prompt": f"{row}+1=", "answer": "1"}) for row in range(EVAL_ROWS)]
            (Path(folder) / "held_out.jsonl").write_text("\n".join(rows_out) + "\n")
            rows = asyncio.run(measure(Path(folder), options.rounds, options.steps))
    finally:
        ray.shutdown()
    settings = {"workers": WORKERS, "places": PLACES, "tokens_per_second": RATE, "rollout_tokens_per_second": SINGLE}
    settings |= {"n": N, "m": M, "prompts": PROMPTS, "update_seconds": UPDATE, "steps": options.steps}
    ends = {"machine": started, "load_1min_at_the_end": machine()["load_1min"]}
    write_result(options.out, {**ends, "settings": settings, "rows": rows})


async def measure(folder: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    pools = Pools(config_of(folder, 1, 0, steps))
    rows: list[dict[str, Any]] = []
    try:
        await pools.start(WORKERS)
        for turn in range(rounds):
            for staleness, every in ((1, 0), (2, 0), (1, 3), (2, 3)):
                config = config_of(folder, staleness, every, steps)
                held_out = list(load_eval(config, load_tokenizer(config.model, light=True))) if every else []
                for once in (True, False) if turn % 2 == 0 else (False, True):
                    learners = PacedLearners(UPDATE)
                    arm = await pools.arm(config, learners, PacedPublisher(), held_out=held_out, once_a_step=once)
                    rows.append(
                        {"round": turn, "staleness": staleness, "evaluation": bool(every), **numbers(arm, once)}
                    )
                    print(rows[-1], flush=True)
    finally:
        await pools.close()
    return rows


def config_of(folder: Path, staleness: int, every: int, steps: int) -> Config:
    engine = {"tokens_per_second": RATE, "rollout_tokens_per_second": SINGLE, "reward_token": 5}
    sections: dict[str, Any] = {
        "selector": {"keep": M},
        "learner": {"prompts_per_step": PROMPTS},
        "staleness": staleness,
    }
    sections["run"] = {"steps": steps}
    if every:
        sections["run"] |= {"eval": {"every": every, "samples": 1}}
        sections["data"] = {"eval": {"path": str(folder / "held_out.jsonl")}}
    generator = {"rollouts_per_prompt": N, "max_sequences": PLACES, "engine_options": engine}
    return paced_config(folder, generator, **sections)


def numbers(arm: Arm, once: bool) -> dict[str, Any]:
    found = {
        "issue": "once a step" if once else "continuous",
        "steps_per_second": arm.steps_per_second(),
        "generator_idle": arm.mean("generator/idle_share"),
        "learner_idle": arm.mean("learner/idle_share"),
        "waited": arm.total("timing_s/wait"),
        "eval_seconds": arm.mean("timing_s/eval"),
        "staleness_mean": arm.mean("staleness/mean"),
        "staleness_max": max(step.get("staleness/max", 0.0) for step in arm.steps),
        "stale_groups": arm.total("groups/stale"),
    }
    return {name: value for name, value in found.items() if value == value}  # without the NaN of what did not happen


if __name__ == "__main__":
    main()
