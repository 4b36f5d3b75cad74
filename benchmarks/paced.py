"""Pools that keep time and do not compute, for benchmarks of the service itself on a CPU.

Generators are real worker actors with the paced engine, real scorers and real memory of rollouts; the selector is the
real actor; the learner takes what it trains from the workers, as the real one does, and then sleeps; new weights are
a version number and a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError

from pods_cluster.config import Config, build_config
from pods_cluster.data import load_prompts, load_tokenizer
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.fetch_rollouts import RolloutFetcher
from pods_cluster.learning.reports import StepResult
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.run.loop import Run
from pods_cluster.run.selector_handle import SelectorHandle
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.types import Prompt, Selection
from pods_cluster.weights.broadcast import PublishReport


def starts_with_one(completions: Sequence[str], **_: Any) -> list[float]:
    """The paced engine marks its right answers with the digit 1."""
    return [float(completion.startswith("1")) for completion in completions]


def make_files(folder: Path, rows: int = 4096) -> None:
    """A tokenizer and prompts."""
    build_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"prompt": f"{row}=", "answer": "1"}) + "\n")


def paced_config(folder: Path, generator: Mapping[str, Any], **sections: Mapping[str, Any] | int) -> Config:
    """A run's configuration on those files."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "rows.jsonl"), "max_prompt_tokens": 16},
        "reward": [{"name": f"{__file__}:starts_with_one", "style": "trl", "range": [0, 1], "batch": 64}],
        "scoring": {"workers": 1},
        "generator": {"engine": "paced", "cpus_per_worker": 0.1, "max_tokens": 128, **generator},
        "selector": {"keep": 4, "no_signal": "keep"},
        "learner": {"prompts_per_step": 8, "tokens_per_microbatch": 4096},
        "run": {"name": "paced", "dir": str(folder), "steps": 8, "samples_every": 0, "checkpoint": {"every": 0}},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, Mapping) else values
    return build_config(tree)


class PacedLearners:
    """`Learners` of one rank that trains `tokens_per_second` completion tokens, or takes `seconds` a step."""

    workers = 1
    handles = ()

    def __init__(self, seconds: float | None = None, tokens_per_second: float = 1.0) -> None:
        self._seconds, self._rate = seconds, tokens_per_second
        self._fetcher = RolloutFetcher()

    async def train(self, selections: list[Selection], step: int) -> StepResult:  # noqa: ARG002
        began = time.monotonic()
        locators = [locator for selection in selections for locator in selection.locators]
        found, report = await asyncio.to_thread(self._fetcher.fetch, locators, 60.0)
        assert not report.missing, report.missing
        fetched = time.monotonic()
        tokens = sum(len(rollout.token_ids) for rollout in found.values())
        total = sum(rollout.total_tokens for rollout in found.values())
        await asyncio.sleep(tokens / self._rate if self._seconds is None else self._seconds)
        return StepResult(
            metrics={},
            trained=[selection.group for selection in selections],
            lost=[],
            trained_rollouts=len(found),
            lost_rollouts=0,
            trained_tokens=tokens,
            total_tokens=total,
            received_bytes=report.received_bytes,
            updates=1,
            fetch_seconds=fetched - began,
            update_seconds=time.monotonic() - fetched,
        )

    async def watch(self) -> None:
        """Its rank never fails."""
        await asyncio.Event().wait()

    def release(self) -> None: ...


class PacedPublisher:
    """`Publisher` whose workers take a version's number, and `seconds`."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds

    async def publish(self, version: int, workers: Mapping[str, Any]) -> PublishReport:
        await asyncio.sleep(self.seconds)
        await asyncio.gather(*(worker.adopt_version.remote(version) for worker in workers.values()))
        return PublishReport(version, self.seconds, 0, {}, False, 1)

    async def catch_up(self, version: int, name: str, worker: Any) -> PublishReport:
        return await self.publish(version, {name: worker})


class Records:
    """Holds step records; takes only registered metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step(self, step: int, values: dict[str, float]) -> None:
        registry.check(values)
        self.steps.append({"step": step, "at": time.monotonic(), **values})

    def evaluation(self, step: int, rows: Any) -> None: ...

    def event(self, kind: str, text: str, **more: Any) -> None: ...

    def samples(self, step: int, groups: Any) -> None: ...


class Pools:
    """A generator pool that lives through several arms, each with a selector of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config
        actor: Any = ray.remote(_Forward)
        self.forward = actor.options(num_cpus=0).remote()
        self.pool = GeneratorPool(config, self.forward)
        self._arms = 0

    async def start(self, workers: int) -> None:
        more = workers - len(self.pool.workers)
        if more > 0:
            await self.pool.add(more)

    async def arm(
        self,
        config: Config,
        learners: Any,
        publisher: Any,
        records: Records | None = None,
        held_out: Sequence[Prompt] = (),
        once_a_step: bool = False,
    ) -> Arm:
        """Run the configuration to its end on this pool, with `Learners` and a `Publisher` that may be real ones.

        `once_a_step`: groups are issued at the start of a step and divided among all workers, as up to version 0.1.
        """
        self._arms += 1
        selector = SelectorHandle.start(config, f"paced-{self._arms}")
        await self.forward.to.remote(selector.handle)
        records = records or Records()
        self.pool.config = config  # how its engines were started is the same in all arms
        run = Run(
            config,
            pool=self.pool,
            selector=selector,
            learners=learners,
            publisher=publisher,
            stream=load_prompts(config, load_tokenizer(config.model, light=True)),
            held_out=list(held_out),
            recorder=cast(Any, records),
            folder=RunFolder(Path(config.run.dir) / f"paced-{self._arms}"),  # nothing is saved
        )
        if once_a_step:
            run.assembler.continuous.on = False
            self.pool.config = config.model_copy(update={"staleness": 0})
        run.scaler.target = type(run.scaler.target)(len(self.pool.workers), 1)
        try:
            await run.main(save=False)
            return Arm(records.steps, await selector.handle.stats.remote())
        finally:
            ray.kill(selector.handle)

    async def close(self) -> None:
        await self.pool.close()


class _Forward:
    """Workers report here for as long as they live; each arm has its own selector behind."""

    def __init__(self) -> None:
        self._selector: Any = None

    async def to(self, selector: Any) -> None:
        self._selector = selector

    async def report(self, shards: Any) -> None:
        with contextlib.suppress(
            RayActorError
        ):  # of an arm that is over; workers report no more to a selector that is gone
            await self._selector.report.remote(shards)


class Arm:
    """Step records of an arm."""

    def __init__(self, steps: list[dict[str, float]], selector: dict[str, Any]) -> None:
        self.steps, self.selector = steps, selector

    def steps_per_second(self) -> float:
        """Over all but the first two steps, in which the queue fills."""
        first, last = self.steps[1], self.steps[-1]
        return (last["step"] - first["step"]) / (last["at"] - first["at"])

    def total(self, name: str) -> float:
        return sum(step.get(name, 0.0) for step in self.steps)

    def mean(self, name: str) -> float:
        """Over all but the first two steps."""
        values = [step[name] for step in self.steps[2:] if name in step]
        return sum(values) / len(values) if values else float("nan")
