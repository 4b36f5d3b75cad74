"""Stages that need no processes, so that the loop itself can be tested: the real selector core, made-up rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pods_cluster.config import Config, parse_config
from pods_cluster.generation.messages import (
    EvalRow,
    Failure,
    GeneratorError,
    NoRoom,
    Portion,
    WorkerPhase,
    WorkerStatus,
)
from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.group_shard import GroupShard
from pods_cluster.learning.reports import (
    CopyReport,
    LearnerError,
    LostGroup,
    ResizeError,
    SkippedUpdate,
    StepResult,
    StorageError,
)
from pods_cluster.scoring.scoring_totals import ScoringTotals
from pods_cluster.selection.policy import selection_policy
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.selection.stopping import Instructions
from pods_cluster.types import FinishReason, GroupId, Prompt, Rollout, SamplingParams, Selection
from pods_cluster.weights.broadcast import PublishReport

YAML = """
model: {path: model}
data: {path: data.jsonl, max_prompt_tokens: 8}
reward: [{name: exact_match}]
generator: {engine: paced, rollouts_per_prompt: 8, max_tokens: 8}
selector: {keep: 4}
learner: {prompts_per_step: 4, tokens_per_microbatch: 64}
run: {name: loop, steps: 3, samples_every: 0, export: false, checkpoint: {every: 0, copy_every: 0}}
"""


def loop_config(*overrides: str) -> Config:
    return parse_config(YAML, overrides)


class Stream:
    """Rows 0, 1, 2, … without end; what is given back comes first."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.returned: list[Prompt] = []
        self.dropped = 0
        self.failed = 0
        self.failures: Sequence[Exception] = ()
        self.note: str | None = None
        self._next = 0

    @property
    def taken(self) -> int:
        return len(self.served)

    @property
    def epochs(self) -> float:
        return self._next / 1000

    def next(self, count: int) -> list[Prompt]:
        prompts = []
        for _ in range(count):
            if self.returned:
                prompts.append(self.returned.pop(0))
            else:
                prompts.append(Prompt(0, self._next, f"row {self._next}", (1, 2)))
                self._next += 1
            self.served.append(prompts[-1].row)
        return prompts

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        self.returned.extend(prompts)

    def state(self, in_flight: Sequence[Prompt] = ()) -> dict[str, Any]:
        return {"next": self._next, "returned": [prompt.row for prompt in [*self.returned, *in_flight]]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]
        self.returned = [Prompt(0, row, f"row {row}", (1, 2)) for row in state["returned"]]


class CoreSelector:
    """The real selector core, called directly."""

    def __init__(self, config: Config) -> None:
        self.core = SelectorCore(selection_policy(config))
        self.staleness = config.staleness

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> list[int]:
        return [self.core.expect(group, size) for group, size in groups]

    async def instructions(self, timeout: float) -> Instructions:
        await asyncio.sleep(0.0005)
        return self.core.instructions()

    async def collect(self, want: int, version: int, timeout: float) -> Any:
        await asyncio.sleep(0)  # a call to another process lets others go on
        return self.core.collect(want, version, self.staleness)

    async def mark_lost(self, worker: str) -> None:
        self.core.mark_lost(worker)

    async def cancel(self, groups: Sequence[GroupId]) -> None:
        self.core.cancel(groups)


Rewards = Callable[[GroupId, int], float]


class Membership:
    """Workers that come and go at once, as far as there is `room` for them in all; `faulty` ones fail to start."""

    def __post_init__(self) -> None:
        self.handles: dict[str, Any] = {"loop/generator/0": object()}
        self.room = 99
        self.faulty = 0
        self.starting: dict[str, WorkerPhase] = {}
        self.retired: set[str] = set()
        self.going: dict[str, float | None] = {}
        self.drained = asyncio.Event()
        self.unfinished: dict[str, list[GroupId]] = {}
        self.count = 1

    @property
    def workers(self) -> dict[str, Any]:
        return self.handles

    @property
    def serving(self) -> list[str]:
        return [name for name in self.handles if name not in self.retired]

    def states(self) -> dict[str, WorkerStatus]:
        there = {name: WorkerPhase.LEAVING if name in self.retired else WorkerPhase.SERVING for name in self.handles}
        return {name: WorkerStatus(phase) for name, phase in (there | self.starting).items()}

    async def prepare(self, placement: float) -> str:
        name = f"loop/generator/{self.count}"
        self.count += 1
        self.starting[name] = WorkerPhase.WAITING
        try:
            async with asyncio.timeout(placement):
                while len(self.handles) + sum(p != WorkerPhase.WAITING for p in self.starting.values()) >= self.room:
                    await asyncio.sleep(0.001)
            self.starting[name] = WorkerPhase.STARTING
            await asyncio.sleep(0.001)
            if self.faulty:
                self.faulty -= 1
                raise GeneratorError(f"{name} could not start: no such model")
        except BaseException as error:
            del self.starting[name]
            if isinstance(error, TimeoutError):
                raise NoRoom(f"{name} was not placed") from None
            raise
        self.starting[name] = WorkerPhase.READY
        return name

    def prepared_worker(self, name: str) -> Any:
        return name

    def admit(self, name: str) -> None:
        assert self.starting.pop(name) is WorkerPhase.READY
        self.handles[name] = object()

    def withdraw(self, name: str) -> None:
        self.starting.pop(name, None)

    def retire(self, count: int) -> list[str]:
        leaving = self.serving[-count:]
        assert len(self.serving) > count
        self.retired.update(leaving)
        return leaving

    def retire_workers(self, names: Sequence[str]) -> None:
        self.retired.update(names)

    async def warned(self) -> dict[str, float | None]:
        return {name: seconds for name, seconds in self.going.items() if name in self.serving}

    async def drain(self, name: str, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.drained.wait(), timeout)

    async def dismiss(self, name: str) -> Failure | None:
        del self.handles[name]
        self.retired.discard(name)
        return Failure(name, "left", self.unfinished.pop(name, []), leaving=True)


@dataclass
class Pool(Membership):
    """Finishes every group at once with `rewards(group, index)`, except those that `hold` says to keep unfinished."""

    selector: CoreSelector
    size: int
    rewards: Rewards
    hold: Callable[[GroupId], bool] = lambda group: False
    version: int = -1
    failures: list[Failure] = field(default_factory=list)
    dropped: list[GroupId] = field(default_factory=list)
    held: list[GroupId] = field(default_factory=list)
    submitted: dict[GroupId, int] = field(default_factory=dict)
    portions: list[Portion] = field(default_factory=list)
    scoring: ScoringTotals = field(default_factory=ScoringTotals)

    async def submit(self, portions: Sequence[Portion]) -> None:
        self.portions.extend(portions)
        for portion in portions:
            group = portion.group
            self.submitted[group] = self.version
            if self.hold(group):
                self.held.append(group)
            else:
                self.finish(group, range(portion.start, portion.stop))

    async def wait_for_room(self, places: int, timeout: float) -> int:
        await asyncio.sleep(0)
        return places

    async def abort(self, groups: Sequence[GroupId]) -> None:
        raise AssertionError(f"{groups}: nothing is unfinished here")

    def finish(self, group: GroupId, indices: range) -> None:
        n = len(indices)
        self.selector.core.add(
            GroupShard(
                group,
                next(iter(self.handles)),
                self.size,
                2,
                np.array(indices, dtype=np.int32),
                rewards := np.array([self.rewards(group, index) for index in indices], dtype=np.float64),
                np.full(n, 3, dtype=np.int32),
                np.full(n, self.submitted[group], dtype=np.int32),
                np.full(n, self.submitted[group], dtype=np.int32),
                np.zeros(n, dtype=np.bool_),
                np.zeros(n, dtype=np.bool_),
                {"exact_match": rewards},
            )
        )

    async def keep(self, selections: Sequence[Selection]) -> None:
        pass

    async def drop(self, groups: Sequence[GroupId]) -> None:
        self.dropped.extend(groups)

    async def sample(self, group: GroupId) -> list[Rollout]:
        """A group's rollouts, as long as the workers have not been told to forget it."""
        if group not in self.submitted or group in self.dropped or group in self.held:
            return []
        version = self.submitted[group]
        return [
            Rollout(group, index, (1, 2), [3, 4, 5], None, FinishReason.STOP, version, version, f"rollout {index}",
                    self.rewards(group, index))
            for index in range(self.size)
        ]  # fmt: skip

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]:
        return []

    async def check(self) -> list[Failure]:
        failures, self.failures = self.failures, []
        for failure in failures:
            self.handles.pop(failure.worker, None)
        return failures

    async def observe(self) -> None:
        pass

    async def fail(self, worker: str, reason: str) -> list[Failure]:
        self.handles.pop(worker, None)
        return [Failure(worker, reason, [])]

    async def replace(self, worker: str) -> str:
        name = f"loop/generator/{int(worker.rsplit('/', 1)[1]) + 1}"
        self.handles[name] = object()
        return name

    async def stats(self) -> PoolStats:
        return PoolStats({})

    async def close(self) -> None:
        pass


@dataclass
class Learners:
    """Remembers what it was given to train; `lose` names groups that it reports as lost."""

    lose: Callable[[GroupId], bool] = lambda group: False
    steps: list[list[Selection]] = field(default_factory=list)
    loaded: Path | None = None
    workers: int = 1
    room: int = 99
    resized: list[tuple[int, int]] = field(default_factory=list)
    """(step, ranks) of each change; a size in `impossible` cannot be started, one in `fatal` loses the group."""
    impossible: frozenset[int] = frozenset()
    fatal: frozenset[int] = frozenset()
    reserved: int = 0
    export_notes: list[str] = field(default_factory=list)
    full: bool = False
    """Whether the disk takes nothing."""
    skips: Callable[[int], list[SkippedUpdate]] = lambda step: []
    """The updates of a step that are skipped."""

    @property
    def handles(self) -> list[str]:
        return [f"{len(self.resized)}/{rank}" for rank in range(self.workers)]

    async def reserve(self, workers: int, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while workers > self.room:
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise LearnerError(f"{workers - self.workers} more learner ranks could not be placed") from None
        self.reserved = workers - self.workers

    def release(self) -> None:
        self.reserved = 0

    async def resize(self, workers: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.reserved = 0
        if workers in self.fatal:
            raise LearnerError("neither size starts")
        if workers in self.impossible:
            raise ResizeError(f"{workers} learner ranks could not start; {self.workers} go on")
        self.workers = workers
        self.resized.append((len(self.steps), workers))

    async def train(self, selections: list[Selection], step: int) -> StepResult:
        self.steps.append(list(selections))
        lost = [
            LostGroup(selection.group, len(selection), len(selection), "worker loop/generator/0 died")
            for selection in selections
            if self.lose(selection.group)
        ]
        trained = [selection for selection in selections if not self.lose(selection.group)]
        skipped = self.skips(step)
        rollouts = 0 if skipped else sum(len(selection) for selection in trained)
        return StepResult(
            metrics={"loss": 0.0},
            trained=[selection.group for selection in trained],
            lost=lost,
            trained_rollouts=rollouts,
            lost_rollouts=0,
            trained_tokens=3 * rollouts,
            total_tokens=5 * rollouts,
            received_bytes=0,
            updates=1 if trained and not skipped else 0,
            skipped=skipped,
            fetch_seconds=0.0,
            update_seconds=0.01,
        )

    async def copy_state(self, path: Path) -> CopyReport:
        path.mkdir(parents=True)
        return CopyReport()

    async def copy_report(self) -> CopyReport:
        return CopyReport(written=True)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "half").touch()
        if self.full:
            raise StorageError("No space left on device: fragments-00000-00000.safetensors")

    async def load(self, path: Path) -> None:
        self.loaded = path

    async def export(self, path: Path) -> list[str]:
        if self.full:
            raise StorageError("No space left on device: model.safetensors")
        path.mkdir(parents=True, exist_ok=True)
        return self.export_notes

    async def close(self) -> None:
        pass


@dataclass
class Publisher:
    """Every worker takes every version, except those that `fails(version, worker)` names."""

    pool: Pool
    fails: Callable[[int, str], bool] = lambda version, worker: False
    published: list[int] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    open: bool = True

    async def publish(self, version: int, workers: Mapping[str, Any]) -> PublishReport:
        self.published.append(version)
        self.pool.version = version
        failed = {worker: "did not answer" for worker in workers if self.fails(version, worker)}
        return PublishReport(version, 0.01, 100, failed, False, 1)

    async def catch_up(self, version: int, name: str, worker: Any) -> PublishReport:
        return PublishReport(version, 0.01, 100, {}, True, 1)

    async def close(self) -> None:
        self.open = False

    async def use_ranks(self, ranks: Sequence[Any]) -> None:
        self.open, self.ranks = True, list(ranks)
