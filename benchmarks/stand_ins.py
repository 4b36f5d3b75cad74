"""Controller and selector with 64 generators that sleep: what a group and a weight version cost, against the model's numbers.

    python -m benchmarks.stand_ins [--workers 4 16 64]

Each generator is an actor of its own that sleeps in place of sampling and reports its group to the real selector actor; the
pool, its messages and the selections are the real ones. Two groups are out for each generator, a step has one for each,
and after it every generator is told of a version (the description of a 70B model's tensors, by reference). CPU seconds
of the processes are compared with what `docs/scale.md` is made from (`service_calls.json`, `selection.json`); the clock
tells whether the machine, which the generators' processes share, keeps up. Writes `benchmarks/results/stand_ins.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray

from benchmarks._groups import M, N
from benchmarks._machine import machine
from benchmarks._result_file import write_result
from benchmarks.scale import costs
from benchmarks.selection import actor_config
from benchmarks.service_calls import LAYERS
from pods_cluster.actor_names import NAMESPACE
from pods_cluster.config import build_config
from pods_cluster.generation.members import Member
from pods_cluster.generation.messages import Portion, WorkerInfo
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.actor import SelectorActor
from pods_cluster.types import GroupId, Prompt
from pods_cluster.weights.protocol import TensorSpec, WeightUpdate

RESULTS = Path(__file__).parent / "results"
SECONDS = 4.0
"""A generator sleeps so long for a group, a quarter more or less."""
STEPS, SKIP = 8, 2


class Sleeper:
    """A generator that sleeps; `reward` of a rollout is made up."""

    def __init__(self, name: str, selector: Any) -> None:
        self.name, self.selector = name, selector
        self.random = np.random.default_rng(hash(name) % 2**32)
        self.tasks: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Any) -> None:
        for request in requests:
            task = asyncio.ensure_future(self._make(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _make(self, request: Any) -> None:
        await asyncio.sleep(SECONDS * self.random.uniform(0.75, 1.25))
        count = len(request.indices)
        zeros = np.zeros(count, dtype=np.int32)
        rewards = self.random.integers(0, 2, count).astype(np.float64)
        shard = GroupShard(group=request.group, worker=self.name, size=request.size, prompt_tokens=128,
                           indices=np.array(request.indices, dtype=np.int32), rewards=rewards,
                           lengths=zeros + 300, first_versions=zeros, last_versions=zeros,
                           truncated=np.zeros(count, dtype=np.bool_), aborted=np.zeros(count, dtype=np.bool_),
                           parts={"made_up": rewards})  # fmt: skip
        self.selector.report.remote([shard])

    async def keep(self, groups: Any) -> None: ...

    async def receive(self, update: Any) -> None: ...

    async def stats(self) -> None: ...


async def measure(workers: int) -> dict[str, Any]:
    """CPU seconds of this process, as the controller, and of the selector, over the steps after the first ones."""
    selector: Any = ray.remote(SelectorActor).options(num_cpus=0.01).remote(actor_config(), own_process=True)
    make: Any = ray.remote(Sleeper)
    names = [f"asleep{workers}/generator/{index}" for index in range(workers)]
    handles = {name: make.options(name=name, num_cpus=0.01).remote(name, selector) for name in names}
    await asyncio.gather(*(handle.stats.remote() for handle in handles.values()))
    pool = GeneratorPool(_config(workers), None)
    pool._members.update(
        {name: Member(handle, WorkerInfo(name, "", 0, "asleep", 0)) for name, handle in handles.items()}
    )
    specs = tuple(TensorSpec(f"model.layers.{layer}.part.{part}.weight", (8192, 8192), "bfloat16")
                  for layer in range(LAYERS) for part in range(9))  # fmt: skip
    update = ray.put(WeightUpdate(1, specs, tuple((index, index + 1) for index in range(len(specs))), 120.0))
    issued = 0

    async def issue(count: int) -> None:
        nonlocal issued
        portions = [Portion(GroupId(0, row), _prompt(row), N, 0, N, 300.0) for row in range(issued, issued + count)]
        issued += count
        await selector.expect.remote([(portion.group, N) for portion in portions])
        for start in range(0, count, 8):  # as places come free
            await pool.submit(portions[start : start + 8])

    async def told() -> float:
        """CPU seconds of this process for a version's calls."""
        began = time.process_time()
        await asyncio.gather(*(handle.receive.remote(update) for handle in handles.values()))
        return time.process_time() - began

    await issue(2 * workers)
    calls: list[float] = []
    began, cpu, selected = 0.0, 0.0, 0.0
    for step in range(STEPS):
        if step == SKIP:
            calls, began, cpu = [], time.monotonic(), time.process_time()
            selected = (await selector.stats.remote())["cpu_seconds"]
        for member in pool._members.values():  # what has come back is no load any more
            member.sampling = max(0, member.sampling - N)
        got = 0
        while got < workers:
            decision = await selector.collect.remote(workers - got, 0, 60.0)
            if decision.timed_out:
                raise TimeoutError(f"{workers - got} groups did not come back within 60 s")
            got += len(decision.selections) + len(decision.fates)
            await pool.keep(decision.selections)
        calls.append(await told())
        await issue(workers)
    steps = STEPS - SKIP
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    selector_used = (await selector.stats.remote())["cpu_seconds"] - selected
    for handle in (*handles.values(), selector):
        ray.kill(handle)
    groups = steps * workers
    return {
        "workers": workers,
        "seconds_per_step": seconds / steps,
        "asleep_seconds_per_step": SECONDS / 2,
        "controller_group": (used - sum(calls)) / groups,
        "controller_call": sum(calls) / groups,
        "selector_group": selector_used / groups,
        "controller_busy": used / seconds,
        "selector_busy": selector_used / seconds,
    }


def modelled() -> dict[str, float]:
    """The costs that the model is given for this: a group is a message of its own here."""
    found = costs()
    return {"controller_group": found["controller_group"], "controller_call": found["controller_call_with_reference"],
            "selector_group": found["selector_message"] + found["selector_group"]}  # fmt: skip


def _config(workers: int) -> Any:
    return build_config(
        {
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "reward": [{"name": "exact_match"}],
            "generator": {"engine": "paced", "workers": workers, "rollouts_per_prompt": N, "max_sequences": 4 * N,
                          "spread": False},
            "selector": {"keep": M},
            "staleness": 1,
            "run": {"name": "asleep"},
        }
    )  # fmt: skip


def _prompt(row: int) -> Prompt:
    return Prompt(0, row, "a question of some length " * 16, tuple(range(128)), (), "an answer", {"id": str(row)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--out", type=Path, default=RESULTS / "stand_ins.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "n": N, "m": M, "modelled": modelled(), "rows": []}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    try:
        for workers in options.workers:
            result["rows"].append(asyncio.run(measure(workers)))
            print(json.dumps(result["rows"][-1]), flush=True)
            write_result(options.out, result)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
