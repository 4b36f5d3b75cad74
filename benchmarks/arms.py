"""Five ways to run the same training, one after the other on pools that stay alive, each from the same first weights.

    python -m benchmarks.arms RUN.yaml [key=value …] --seconds 75 [--out benchmarks/results/arms_x.json]
    python -m benchmarks.arms benchmarks/arms_cpu.yaml --steps 60 --seeds 3 --figure docs/images/arms.png

The arms: `sync` (staleness 0), `k1`, `k2`, `k1-waves` (staleness 1, `selector.settle: waves`), and `k1-planned`: staleness 1
with the n of `pods plan`'s arithmetic on what the k1 arm measured. Everything else is the configuration's. Workers and
ranks are started once a seed; between two arms the learner reads the checkpoint that it wrote before the first, and
sends those weights again. An arm ends after --steps, or --seconds of steps, whichever comes first.

`tokens_saved` is what an arm did not sample: against the rollouts that its groups would have had at its own n, at the mean
length of its finished rollouts. Engines that are compiled or have cold caches make the first steps slow: rates leave
the first two steps out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.paced import Arm, Pools, Records
from pods_cluster.config import Config, build_config, dump_config, load_config
from pods_cluster.data import load_eval, load_tokenizer
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.run.cluster import connect
from pods_cluster.run.controller import start_broadcaster
from pods_cluster.sizing.balance import StepShape, forecast, measured_rates
from pods_cluster.sizing.step_measurement import StepMeasurement
from pods_cluster.telemetry.catalog import STAGES

ARMS: dict[str, dict[str, Any]] = {
    "sync": {"staleness": 0},
    "k1": {"staleness": 1},
    "k2": {"staleness": 2},
    "k1-waves": {"staleness": 1, "selector": {"settle": "waves"}},
    "k1-planned": {"staleness": 1},
}
MEANS = (
    "generator/idle_share",
    "learner/idle_share",
    "generator/tokens_per_second",
    "staleness/mean",
    "completions/mean_length",
    "completions/kept_mean_length",
    "rollout_to_update_ratio",
    "sampling/importance_sampling_ratio/mean",
    *(f"timing_s/{stage}" for stage in STAGES),
)
CURVES = ("reward", "reward/uncensored", "eval/greedy_accuracy")


def arm_config(base: Config, arm: str, seed: int, seconds: float | None, steps: int, n: int | None) -> Config:
    """The configuration of one arm."""
    tree = base.model_dump(mode="json")
    for section, values in ARMS[arm].items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    tree["run"] |= {"steps": steps, "max_seconds": seconds, "seed": seed, "samples_every": 0, "export": False}
    tree["run"]["checkpoint"] |= {"every": 0}
    # Numerics are the same for all: the correction acts in every arm, or its absence would be a difference between them.
    tree["learner"]["correction"] |= {"mode": "on"}
    if n is not None:
        tree["generator"]["rollouts_per_prompt"] = n
    return build_config(tree)


class Printing(Records):
    """Says each step as it comes."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def step(self, step: int, values: dict[str, float]) -> None:
        super().step(step, values)
        shown = {
            name: round(values[name], 3)
            for name in ("reward", "eval/greedy_accuracy", "timing_s/step", "timing_s/generate", "timing_s/update")
            if name in values
        }
        print(f"{self.label} step {step}: {shown}", flush=True)

    def event(self, kind: str, text: str, **more: Any) -> None:  # noqa: ARG002
        print(f"{self.label} {kind}: {text}", flush=True)


async def one_seed(
    base: Config, seed: int, arms: list[str], arguments: argparse.Namespace, done: Callable[..., None]
) -> None:
    """All arms of one seed, on pools of their own."""
    first = arm_config(base, "sync", seed, arguments.seconds, arguments.steps, None)
    pools, learners = Pools(first), LearnerGroup(first)
    try:
        await asyncio.gather(pools.start(first.generator.workers), learners.start())
        publisher = start_broadcaster(first, learners, pools.pool)
        held_out = load_eval(first, load_tokenizer(first.model, light=True)) if first.run.eval.every else []
        with tempfile.TemporaryDirectory(prefix="pods-arms-") as folder:
            start = Path(folder) / "start"
            await learners.save(start)
            n = None
            for name in arms:
                config = arm_config(
                    base, name, seed, arguments.seconds, arguments.steps, n if name == "k1-planned" else None
                )
                await learners.load(start)
                records = Printing(f"seed {seed} {name}")
                arm = await pools.arm(config, learners, publisher, records, held_out)
                row = summary(arm, config) | {"seed": seed, "arm": name}
                if name == "k1":
                    measured = [StepMeasurement.from_record(record) for record in arm.steps]
                    plan = forecast(measured_rates(measured), StepShape.of(config))
                    n = min(max(plan.balanced_rollouts, config.selector.keep), 4 * config.generator.rollouts_per_prompt)
                    row["planned_rollouts_per_prompt"] = n
                done(row, config)
        await publisher.close()
    finally:
        await asyncio.gather(pools.close(), learners.close(), return_exceptions=True)


def summary(arm: Arm, config: Config) -> dict[str, Any]:
    """The row of an arm in the result file."""
    steps = [step for step in arm.steps if "timing_s/step" in step]
    finished, sampled = arm.total("rollouts/generated"), arm.total("tokens/sampled")
    length = (sampled - arm.total("tokens/aborted")) / max(finished, 1)
    fates = arm.selector["fates"]
    groups = sum(count for fate, count in fates.items() if fate != "cancelled")
    whole = groups * config.generator.rollouts_per_prompt * length
    worked = sum(step["timing_s/step"] for step in steps[2:])
    return {
        "n": config.generator.rollouts_per_prompt,
        "m": config.selector.keep,
        "steps": len(steps),
        "seconds": sum(step["timing_s/step"] for step in steps),
        "steps_per_second": len(steps[2:]) / worked if worked else None,
        "rollouts": finished,
        "trained": arm.total("rollouts/trained"),
        "tokens_sampled": sampled,
        "tokens_saved": 1.0 - sampled / whole if whole and config.selector.settle != "off" else 0.0,
        "fates": fates,
        "means": {name: mean(found) for name in MEANS if (found := [s[name] for s in steps[2:] if name in s])},
        "curves": {
            name: {"steps": [s["step"] for s in found], "values": [round(s[name], 5) for s in found]}
            for name in CURVES
            if (found := [step for step in arm.steps if name in step])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=1000, help="most steps of an arm")
    parser.add_argument("--seconds", type=float, help="most seconds of an arm's steps")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "arms.json")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))}: no such arm; there are {', '.join(ARMS)}")
    base = load_config(arguments.config, arguments.overrides)
    found: list[dict[str, Any]] = []

    def done(row: dict[str, Any], config: Config) -> None:
        found.append(row)
        result = {"machine": machine(), "config": dump_config(config), "arms": found}
        write_result(arguments.out, result)
        shown = {key: value for key, value in row.items() if key not in ("curves", "means")}
        print(json.dumps(shown | {key: row["means"].get(key) for key in MEANS[:2]}), flush=True)

    connect(base)
    try:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            asyncio.run(one_seed(base, seed, arms, arguments, done))
    finally:
        ray.shutdown()
    if arguments.figure:
        from benchmarks.arms_figure import draw

        draw(json.loads(arguments.out.read_text()), arguments.figure)


if __name__ == "__main__":
    main()
