"""What overlap, settling and more generators are worth, and what does not grow, on pools that keep time.

    python -m benchmarks.overlap [overlap settling bytes generators selector_seconds]

Workers, scorers, selector, controller loop and the way of rollouts to the learner are the real ones; tokens are slept
for, not computed, and so is the update (see `benchmarks/paced.py`). Five parts: steps a second with staleness 0, 1 and
2 where generating and updating take as long (target: k = 1 at least 1.5 times as fast as 0); tokens saved by waves and
abort at n = 64, m = 16 on binary rewards, against the same prompts with settling off (targets: 25 % and 10 %); steps a
second against the number of generators; bytes to the learner against n and m; selector seconds a group against rollout
length. Parts that are not named keep their earlier results. Writes `benchmarks/results/overlap.json` and
`docs/images/overlap.png`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import numpy as np
import psutil
import ray

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.overlap_figure import draw
from benchmarks.paced import PacedLearners, PacedPublisher, Pools, Records, make_files, paced_config
from pods_cluster.config import SelectorConfig
from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.policy import SelectionPolicy
from pods_cluster.selection.rule_registry import resolve
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.types import GroupId

RESULT = Path(__file__).parent / "results" / "overlap.json"
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "overlap.png"
RATE = 4000.0
"""Tokens a second of one generator."""
MEAN = 64.5
"""Tokens of a rollout: uniform over 1 … 128."""
HARDNESS = (0.05, 0.15, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
"""Share of right answers, by prompt: from hard to easy."""
ENGINE = {"tokens_per_second": RATE, "shortest": 1, "longest": 128, "accuracy": list(HARDNESS), "reward_token": 5}
PROMPTS = 8


PARTS = ("overlap", "settling", "bytes", "generators", "selector_seconds")


def main(parts: list[str]) -> None:
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"{sorted(unknown)}: no such part; there are {', '.join(PARTS)}")
    parts = parts or list(PARTS)
    if "selector_seconds" in parts:
        _save({"selector_seconds": selector_seconds()})
    if set(parts) - {"selector_seconds"}:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="pods")
        try:
            with tempfile.TemporaryDirectory() as folder:
                make_files(Path(folder))
                asyncio.run(_measure(Path(folder), parts))
        finally:
            ray.shutdown()
    result = _results()
    if all(part in result for part in PARTS):
        draw(result, FIGURE)


def _results() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.is_file() else {}


def _save(found: dict[str, Any]) -> None:
    """Results appear part by part, each with the machine and its load."""
    machines = {**_results().get("machines", {}), **dict.fromkeys(found, machine())}
    write_result(RESULT, {**_results(), **found, "machines": machines})
    print(json.dumps(found, indent=1), flush=True)


async def _measure(folder: Path, parts: list[str]) -> None:
    pools = Pools(config_of(folder, 16, 4, 1))
    try:
        rows = []
        if "generators" in parts:
            await pools.start(1)
            rows.append(await generators(pools, folder, 1))
        await pools.start(2)
        for name, part in (("overlap", overlap), ("settling", settling), ("bytes", bytes_to_learner)):
            if name in parts:
                _save({name: await part(pools, folder)})
        if "generators" in parts:
            for count in (2, 4, 6):
                await pools.start(count)
                rows.append(await generators(pools, folder, count))
            _save({"generators": rows})
    finally:
        await pools.close()


def config_of(folder: Path, n: int, m: int, steps: int, staleness: int = 0, **selector: Any) -> Any:
    return paced_config(
        folder,
        {"rollouts_per_prompt": n, "max_sequences": 256, "engine_options": ENGINE},
        selector={"keep": m, **selector},
        learner={"prompts_per_step": PROMPTS},
        staleness=staleness,
        run={"steps": steps},
    )


async def overlap(pools: Pools, folder: Path) -> list[dict[str, Any]]:
    """The learner's update takes as long as two generators take for the step's rollouts."""
    n, rows = 32, []
    balanced = PROMPTS * n * MEAN / (2 * RATE)
    for staleness in (0, 1, 2):
        arm = await pools.arm(config_of(folder, n, 8, 10, staleness), PacedLearners(balanced), PacedPublisher())
        rows.append(
            {
                "staleness": staleness,
                "balanced_seconds": balanced,
                "steps_per_second": arm.steps_per_second(),
                "generator_idle": arm.mean("generator/idle_share"),
                "staleness_max": max(step["staleness/max"] for step in arm.steps),
                "overtaken": arm.total("groups/overtaken"),
                "stale_rollouts": arm.total("rollouts/stale"),
            }
        )
        rows[-1]["speedup"] = rows[-1]["steps_per_second"] / rows[0]["steps_per_second"]
    return rows


async def settling(pools: Pools, folder: Path) -> list[dict[str, Any]]:
    """The same prompts, hence the same rollouts, with settling off, in four and eight waves, and with abort."""
    rows: list[dict[str, Any]] = []
    arms: dict[str, dict[str, Any]] = {
        "off": {},
        "waves 4": {"settle": "waves", "waves": 4},
        "waves 8": {"settle": "waves", "waves": 8},
        "abort": {"settle": "abort"},
    }
    for label, options in arms.items():
        arm = await pools.arm(config_of(folder, 64, 16, 4, **options), PacedLearners(0.05), PacedPublisher(0.0))
        tokens = arm.total("tokens/sampled")
        whole = rows[0]["tokens"] if rows else tokens
        seconds = arm.total("timing_s/generate")
        rows.append(
            {
                "settle": label,
                "tokens": tokens,
                "saved_share": 1.0 - tokens / whole,
                "estimated_saved_share": arm.total("tokens/saved") / (tokens + arm.total("tokens/saved")),
                "aborted_tokens": arm.total("tokens/aborted"),
                "unissued_rollouts": arm.total("rollouts/unissued"),
                "settled_groups": arm.total("groups/settled"),
                "groups": arm.total("groups/trained"),
                "trained_rollouts": arm.total("rollouts/trained"),
                "generate_seconds": seconds,
                "mean_length": arm.mean("completions/mean_length"),
                "kept_length": arm.mean("completions/kept_mean_length"),
                "kept_reward_std": arm.mean("reward_std/kept"),
            }
        )
    return rows


class _WithCpu(Records):
    """Records, and the CPU seconds of this process and of all that it started at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_seconds: list[float] = []

    def step(self, step: int, values: dict[str, float]) -> None:
        super().step(step, values)
        self.cpu_seconds.append(_cpu_seconds())


def _cpu_seconds() -> float:
    me, total = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def generators(pools: Pools, folder: Path, count: int) -> dict[str, Any]:
    """One learner whose update takes as long as four generators take for the step's rollouts, staleness 1; with the CPU
    seconds that a step takes of all processes, which share the machine's cores."""
    n = 32
    update = PROMPTS * n * MEAN / (4 * RATE)
    records = _WithCpu()
    arm = await pools.arm(config_of(folder, n, 8, 12, staleness=1), PacedLearners(update), PacedPublisher(), records)
    return {
        "generators": count,
        "steps_per_second": arm.steps_per_second(),
        "learner_bound_steps_per_second": 1.0 / (update + 0.05),
        "generator_idle": arm.mean("generator/idle_share"),
        "learner_idle": arm.mean("learner/idle_share"),
        "stage_seconds": {
            stage: arm.mean(f"timing_s/{stage}") for stage in ("wait", "fetch", "update", "publish", "step")
        },
        "cpu_seconds_per_step": (records.cpu_seconds[-1] - records.cpu_seconds[1]) / (len(records.cpu_seconds) - 2),
        "load_1min": os.getloadavg()[0],
    }


async def bytes_to_learner(pools: Pools, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for n, m in ((16, 8), (32, 8), (64, 8), (64, 4), (64, 16)):
        arm = await pools.arm(config_of(folder, n, m, 2), PacedLearners(0.0), PacedPublisher(0.0))
        rows.append(
            {
                "n": n,
                "m": m,
                "bytes_per_step": arm.total("learner/received_bytes") / len(arm.steps),
                "sampled_tokens_per_step": arm.total("tokens/sampled") / len(arm.steps),
            }
        )
    return rows


def selector_seconds() -> list[dict[str, Any]]:
    """CPU seconds that the selector's core spends on a group of 64, from shards to selection."""
    rows = []
    random = np.random.default_rng(0)
    for length in (100, 1_000, 10_000, 100_000):
        core = SelectorCore(SelectionPolicy(SelectorConfig(keep=16), resolve("max_variance"), seed=0))
        groups = [GroupId(0, row) for row in range(2000)]
        shards = [_shard(group, length, random) for group in groups]
        before = time.process_time()
        for group, shard in zip(groups, shards, strict=True):
            core.expect(group, 64)
            core.add(shard)
            core.collect(1, 0, 0)
        rows.append({"length": length, "seconds_per_group": (time.process_time() - before) / len(groups)})
    return rows


def _shard(group: GroupId, length: int, random: np.random.Generator) -> GroupShard:
    n = 64
    zeros = np.zeros(n, np.int32)
    return GroupShard(
        group,
        "worker",
        n,
        100,
        np.arange(n, dtype=np.int32),
        random.integers(0, 2, n).astype(np.float64),
        random.integers(1, length, n).astype(np.int32),
        zeros,
        zeros,
        np.zeros(n, np.bool_),
        np.zeros(n, np.bool_),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
