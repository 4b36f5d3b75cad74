"""What one call of the service costs the process that makes it: the controller's calls to generators, a rank's fetch, the plan.

    python -m benchmarks.service_calls [--workers 16 --groups 256]

Generators are stand-ins, actors that answer and do nothing; the pool, the messages, the packing and the plan are the real
ones. Times are CPU seconds of the calling process (Ray's threads in it too), so that other work on the machine counts
little: a process cannot make more calls a second than 1 / that. `benchmarks/scale.py` builds on the numbers. Writes
`benchmarks/results/service_calls.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray

from benchmarks._groups import M, N, make_groups
from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.actor_names import NAMESPACE
from pods_cluster.config import build_config
from pods_cluster.generation.members import Member
from pods_cluster.generation.messages import Portion, WorkerInfo
from pods_cluster.generation.packed_rollouts import pack
from pods_cluster.generation.placement import ANSWER_SECONDS, answer_or_none
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.fetch_rollouts import RolloutFetcher
from pods_cluster.learning.step_plan import PlanSettings, plan_step
from pods_cluster.types import GroupId, Locator, Prompt, Selection
from pods_cluster.weights.protocol import TensorSpec, WeightUpdate

RESULT = Path(__file__).parent / "results" / "service_calls.json"
TOKENS = 300
LAYERS = 80
"""Of a 70B model; nine tensors each, and three beside them."""


class StandIn:
    """A generator that answers at once. `take` gives rollouts of `TOKENS` tokens for what it is asked."""

    async def submit(self, requests: Any) -> None: ...

    async def keep(self, groups: Any) -> None: ...

    async def receive(self, update: Any) -> None: ...

    async def stats(self) -> None: ...

    async def take(self, groups: list[tuple[GroupId, list[int]]]) -> Any:
        tokens, rollouts = list(range(TOKENS)), []
        from pods_cluster.types import FinishReason, Rollout

        for group, indices in groups:
            rollouts += [
                Rollout(GroupId(*group), index, tuple(range(128)), tokens, [0.5] * TOKENS, FinishReason.STOP, 0, 0)
                for index in indices
            ]
        return pack(rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    started = machine()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    try:
        found = asyncio.run(measure(options.workers, options.groups))
    finally:
        ray.shutdown()
    found["plan_rollout"] = plan_seconds(options.groups)
    settings = {
        "workers": options.workers,
        "groups": options.groups,
        "n": N,
        "m": M,
        "tokens": TOKENS,
        "layers": LAYERS,
    }
    write_result(options.out, {"machine": started, "settings": settings, "cpu_seconds": found})
    print(found)


async def measure(workers: int, groups: int) -> dict[str, float]:
    """CPU seconds: of a group that goes out and comes back, a call to one generator with nothing in it, with a weight
    version's description, and with a reference to that; of a rollout and a worker's answer in a rank's fetch."""
    actor: Any = ray.remote(StandIn)
    names = [f"calls/generator/{index}" for index in range(workers)]
    handles = {name: actor.options(name=name, num_cpus=0.01).remote() for name in names}
    await asyncio.gather(*(handle.stats.remote() for handle in handles.values()))
    pool = GeneratorPool(_config(workers), None)
    pool._members.update(
        {name: Member(handle, WorkerInfo(name, "", 0, "stand-in", 0)) for name, handle in handles.items()}
    )
    found: dict[str, float] = {}

    async def groups_out_and_back(first: int) -> None:
        portions = [Portion(GroupId(0, row), _prompt(row), N, 0, N, 300.0) for row in range(first, first + groups)]
        for start in range(0, groups, 8):  # as places come free
            await pool.submit(portions[start : start + 8])
        chosen = [_selection(portion.group, pool) for portion in portions]
        for start in range(0, groups, 64):
            await pool.keep(chosen[start : start + 64])

    first = 0
    seconds = []
    for _ in range(4):
        began = time.process_time()
        await groups_out_and_back(first)
        seconds.append((time.process_time() - began) / groups)
        first += groups
    found["controller_group"] = min(seconds[1:])

    specs = tuple(
        TensorSpec(f"model.layers.{layer}.part.{part}.weight", (8192, 8192), "bfloat16")
        for layer in range(LAYERS)
        for part in range(9)
    )
    update = WeightUpdate(1, specs, tuple((index, index + 1) for index in range(len(specs))), 120.0)
    reference = ray.put(update)
    found["controller_call"] = await _per_call(handles, lambda handle: handle.stats.remote())
    found["controller_call_with_specs"] = await _per_call(handles, lambda handle: handle.receive.remote(update))
    found["controller_call_with_reference"] = await _per_call(handles, lambda handle: handle.receive.remote(reference))
    few, many = await asyncio.to_thread(_fetch, names, 1), await asyncio.to_thread(_fetch, names, 33)
    found["fetch_rollout"] = (many - few) / 32
    found["fetch_call"] = max(few - found["fetch_rollout"], 0.0)
    return found


async def _per_call(handles: Mapping[str, Any], call: Callable[[Any], Any], rounds: int = 12) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        await asyncio.gather(*(answer_or_none(call(handle), ANSWER_SECONDS) for handle in handles.values()))
        seconds.append((time.process_time() - began) / len(handles))
    return float(np.median(seconds))


def _fetch(names: list[str], rollouts: int) -> float:
    """CPU seconds a worker, where a rank takes so many rollouts of each."""
    fetcher, seconds = RolloutFetcher(), []
    locators = [Locator(name, GroupId(0, 0), index) for name in names for index in range(rollouts)]
    for _ in range(8):
        began = time.process_time()
        found, _ = fetcher.fetch(locators, 30.0)
        seconds.append((time.process_time() - began) / len(names))
        assert len(found) == len(locators)
    return float(np.median(seconds))


def plan_seconds(groups: int) -> float:
    """CPU seconds of the plan of a step for 64 ranks, a kept rollout."""
    _, kept, _ = make_groups(groups, np.random.default_rng(0), vocabulary=100, prompt_tokens=128, longest=512)
    settings = PlanSettings(ranks=64, tokens_per_microbatch=16384, packed=True)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        plan_step(kept, settings)
        seconds.append((time.process_time() - began) / (groups * M))
    return min(seconds)


def _config(workers: int) -> Any:
    return build_config(
        {
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "reward": [{"name": "exact_match"}],
            "generator": {"engine": "paced", "workers": workers, "rollouts_per_prompt": N, "max_sequences": 512},
            "selector": {"keep": M},
            "staleness": 1,
            "run": {"name": "calls"},
        }
    )


def _prompt(row: int) -> Prompt:
    return Prompt(0, row, "a question of some length " * 16, tuple(range(128)), (), "an answer", {"id": str(row)})


def _selection(group: GroupId, pool: GeneratorPool) -> Selection:
    holders = pool._holders(group)
    locators = [Locator(holders[place % len(holders)], group, place) for place in range(M)]
    zeros = np.zeros(M)
    return Selection(group, locators, zeros, zeros.astype(np.int32), 128, zeros.astype(np.int32), 0.5, 0.5, N)


if __name__ == "__main__":
    main()
