"""How fast selection is: one group by rule, and the selector actor end to end.

    python -m benchmarks.selection

Targets: max_variance of 64 -> 16 in at most 100 us and of 4096 -> 256 in at most 2 ms a group, seeding of the random
stream included; over 2,000 groups of 64 rollouts a second through the actor (report + collect), 8 or more groups a
message, the same for rollouts of 10 and of 10,000 tokens. Writes `benchmarks/results/selection.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.config import Config, build_config
from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.rule_registry import resolve
from pods_cluster.selection.select import select
from pods_cluster.types import GroupId

SIZES = ((64, 16, 100.0), (4096, 256, 2000.0))
RULES = ("max_variance", "max_reward", "random", "percentile")
ACTOR_TARGET = 2000.0
RESULTS = Path(__file__).parent / "results" / "selection.json"


def reward_kinds(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    binary = (rng.random(n) < 0.3).astype(np.float64)
    return {"continuous": rng.normal(size=n), "binary": binary, "composite": binary + 0.1 * rng.integers(0, 3, n)}


def time_select(rule_name: str, rewards: np.ndarray, m: int, repeats: int) -> dict[str, float]:
    """Microseconds a call of `select` (exclusions, seeding, rule, statistics), each call another group.

    `cpu_us` is the median of the thread's own CPU time, which other processes of the machine do not add to.
    """
    rule = resolve(rule_name)
    batch = 20
    samples, cpu = [], []
    for repeat in range(repeats):
        cpu_started, started = time.thread_time(), time.perf_counter()
        for row in range(batch):
            select(rewards, m, rule, 0, GroupId(0, repeat * batch + row))
        samples.append((time.perf_counter() - started) / batch * 1e6)
        cpu.append((time.thread_time() - cpu_started) / batch * 1e6)
    return {"min_us": min(samples), "median_us": statistics.median(samples), "cpu_us": statistics.median(cpu)}


def make_shards(groups: int, n: int, tokens: int) -> list[GroupShard]:
    rng = np.random.default_rng(tokens)
    shards = []
    for row in range(groups):
        correct = rng.integers(0, 2, n).astype(np.float64)
        shards.append(
            GroupShard(
                group=GroupId(0, row),
                worker=f"bench/generator/{row % 6}",
                size=n,
                prompt_tokens=100,
                indices=np.arange(n, dtype=np.int32),
                rewards=correct + 0.1 * rng.integers(0, 2, n),
                lengths=rng.integers(tokens // 2, tokens + 1, n).astype(np.int32),
                first_versions=np.zeros(n, dtype=np.int32),
                last_versions=np.zeros(n, dtype=np.int32),
                truncated=np.zeros(n, dtype=np.bool_),
                aborted=np.zeros(n, dtype=np.bool_),
                parts={"math_answer": correct},
            )
        )
    return shards


def time_actor(actor: Any, shards: list[GroupShard], per_message: int, want: int) -> tuple[float, float]:
    """Groups a second from the first report to the last selection in the caller's hands, by the clock and by the
    actor's own CPU time (all its threads): the latter is what the actor could pass if nothing else used the machine.
    """
    import ray

    ray.get(actor.expect.remote([(shard.group, shard.size) for shard in shards]))
    messages = [shards[i : i + per_message] for i in range(0, len(shards), per_message)]
    before: Any = ray.get(actor.stats.remote())
    started = time.perf_counter()
    for message in messages:
        actor.report.remote(message)
    received = 0
    while received < len(shards):
        decision: Any = ray.get(actor.collect.remote(min(want, len(shards) - received), 0, 60.0))
        received += len(decision.selections) + len(decision.fates)
        if decision.timed_out:
            raise TimeoutError(f"{received} of {len(shards)} groups came back within 60 s")
    seconds = time.perf_counter() - started
    after: Any = ray.get(actor.stats.remote())
    return len(shards) / seconds, len(shards) / (after["cpu_seconds"] - before["cpu_seconds"])


def summary(rates: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*rates, strict=True)
    return {
        "median_groups_per_s": statistics.median(wall),
        "max_groups_per_s": max(wall),
        "groups_per_cpu_s": statistics.median(cpu),
    }


def actor_config() -> Config:
    """16 of 64 rollouts by `max_variance`; what the selector does not read is made up."""
    return build_config(
        {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "reward": [{"name": "exact_match"}],
            "generator": {"rollouts_per_prompt": 64},
            "selector": {"keep": 16},
            "run": {"name": "bench"},
        }
    )


def measure_actor(groups: int, per_message: int, want: int, rounds: int) -> dict[str, dict[str, float]]:
    import ray

    from pods_cluster.selection.actor import start_selector

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        samples: dict[int, list[tuple[float, float]]] = {10: [], 10_000: []}
        attempt = 0
        for _ in range(rounds + 1):
            for tokens, rates in samples.items():
                actor = start_selector(f"bench-{attempt}", actor_config())
                attempt += 1
                shards = make_shards(groups, 64, tokens)
                time_actor(actor, shards[: 8 * per_message], per_message, want)  # connection and imports
                fresh = shards[8 * per_message :]
                rates.append(time_actor(actor, fresh, per_message, want))
                ray.kill(actor)
        return {str(tokens): summary(rates[1:]) for tokens, rates in samples.items()}  # the first round warms up
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4096, help="groups through the actor in one round")
    parser.add_argument("--per-message", type=int, nargs="+", default=[8, 32], help="groups in one report")
    parser.add_argument("--want", type=int, default=64, help="groups asked for in one collect")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=100, help="batches of 20 selections timed for each row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    result: dict[str, Any] = {
        "machine": machine(),
        "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
        "select": [],
    }
    console = Console()
    table = Table(title="select: microseconds a group, seeding included")
    for column in ("n -> m", "rule", "rewards", "min", "median", "cpu", "target"):
        table.add_column(column, justify="left" if column in ("rule", "rewards") else "right")
    for n, m, target in SIZES:
        for rule in RULES:
            for kind, rewards in reward_kinds(n).items():
                if rule != "max_variance" and kind != "continuous":
                    continue
                times = time_select(rule, rewards, m, arguments.repeats)
                result["select"].append({"n": n, "m": m, "rule": rule, "rewards": kind, "target_us": target, **times})
                shown = [f"{times[key]:.1f}" for key in ("min_us", "median_us", "cpu_us")]
                table.add_row(f"{n} -> {m}", rule, kind, *shown, f"{target:.0f}")
    console.print(table)

    table = Table(title="selector actor: groups of 64 a second, report + collect")
    for column in ("groups a message", "tokens a rollout", "median", "max", "a CPU second", "target"):
        table.add_column(column, justify="right")
    result["actor"] = {}
    for per_message in arguments.per_message:
        found = measure_actor(arguments.groups, per_message, arguments.want, arguments.rounds)
        result["actor"][str(per_message)] = found
        for tokens, rates in found.items():
            shown = [f"{rates[key]:,.0f}" for key in ("median_groups_per_s", "max_groups_per_s", "groups_per_cpu_s")]
            table.add_row(str(per_message), tokens, *shown, f"{ACTOR_TARGET:,.0f}")
    console.print(table)
    where = result["machine"]
    console.print(f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, load {where['load_1min']}")
    write_result(arguments.out, result)
    console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
