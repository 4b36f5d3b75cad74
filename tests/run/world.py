"""A world of generators that has no time of its own: whenever the run asks it something, something random happens."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from pods_cluster.config import Config
from pods_cluster.generation.distribute import assign
from pods_cluster.generation.messages import Failure, GeneratorError, Portion, WorkerPhase, WorkerStatus
from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.group_shard import GroupShard
from pods_cluster.learning.reports import StepResult
from pods_cluster.run.loop import Run
from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.scoring.scoring_totals import ScoringTotals
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.types import Fate, GroupId, Prompt, Rollout, SamplingParams, Selection
from pods_cluster.weights.broadcast import PublishReport
from tests.run.parts import CoreSelector, Learners, Stream

PATIENCE = 20_000
"""Questions to the selector after which a run that has not ended counts as stuck."""


@dataclass
class Chances:
    """Of each event at each tick."""

    finish: float = 0.3
    die: float = 0.0
    scale: float = 0.0
    refuse_weights: float = 0.0
    lose_on_the_way: float = 0.0
    no_reward: float = 0.0
    accuracy: float = 0.5


@dataclass
class Worker:
    running: dict[tuple[GroupId, int], int | None] = field(default_factory=dict)
    """First version of each, None while it waits in the engine's queue."""
    held: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    aborted: set[tuple[GroupId, int]] = field(default_factory=set)
    groups: set[GroupId] = field(default_factory=set)
    dead: bool = False
    draining: bool = False


class World:
    """`Generators` and `Publisher`; `selector` is the real core, asked through `Asking`."""

    def __init__(self, config: Config, selector: CoreSelector, chances: Chances, seed: int) -> None:
        self.config, self.selector, self.chances = config, selector, chances
        self.random = random.Random(seed)
        self.aside = random.Random(seed + 1)  # of what may be asked earlier or later without another outcome
        self.names = 0
        self.scoring = ScoringTotals()
        self.members: dict[str, Worker] = {}
        self.starting: set[str] = set()
        self.scale: Callable[[int], Any] = lambda workers: None
        self.sizes: dict[GroupId, int] = {}
        self.version = -1
        self.ticks = 0
        self.issued: dict[GroupId, set[int]] = {}
        self.room = 0
        for _ in range(config.generator.workers):
            self.join()

    async def warned(self) -> dict[str, float | None]:
        """No worker is told to go here; the scaler asks once a law has taken it two seconds."""
        return {}

    def join(self) -> str:
        name = self._name()
        self.members[name] = Worker()
        return name

    def _name(self) -> str:
        self.names += 1
        return f"loop/generator/{self.names - 1}"

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    async def awhile(self, chance: random.Random | None = None) -> None:
        """Others go on meanwhile, for a few turns."""
        for _ in range((chance or self.random).randrange(4)):
            await asyncio.sleep(0)

    # What happens by itself.

    def tick(self) -> None:
        self.ticks += 1
        assert self.ticks < PATIENCE, "the run makes no progress"
        if self.chance(self.chances.scale):
            self.scale(self.random.randint(1, 4))
        for name, worker in list(self.members.items()):
            if worker.dead:
                continue
            if self.chance(self.chances.die):
                worker.dead = True
                continue
            self._work(name, worker)

    def _work(self, name: str, worker: Worker) -> None:
        for rollout, version in list(worker.running.items()):
            if version is None and self.chance(0.5):
                worker.running[rollout] = self.version
        finished = [
            rollout
            for rollout, version in worker.running.items()
            if rollout in worker.aborted or (version is not None and self.chance(self.chances.finish))
        ]
        self.random.shuffle(finished)
        for rollout in finished:
            version = worker.running.pop(rollout)
            aborted = rollout in worker.aborted
            worker.aborted.discard(rollout)
            worker.held[rollout] = self.version if version is None else version
            self.report(name, rollout, aborted)
            if self.chance(0.02):
                self.report(name, rollout, aborted)  # a report that is sent twice

    def reward(self, rollout: tuple[GroupId, int]) -> float:
        stream = random.Random(f"{rollout}{self.config.run.seed}")
        if stream.random() < self.chances.no_reward:
            return float("nan")
        return float(stream.random() < self.chances.accuracy)

    def report(self, name: str, rollout: tuple[GroupId, int], aborted: bool) -> None:
        group, index = rollout
        version = self.members[name].held[rollout]
        self.selector.core.add(
            GroupShard(
                group,
                name,
                self.sizes[group],
                2,
                np.array([index], np.int32),
                np.array([float("nan") if aborted else self.reward(rollout)]),
                np.array([1 if aborted else 3], np.int32),
                np.array([version], np.int32),
                np.array([self.version], np.int32),
                np.array([False]),
                np.array([aborted]),
            )
        )

    # Generators.

    @property
    def workers(self) -> Mapping[str, Any]:
        return {name: name for name in self.members}

    async def submit(self, portions: Sequence[Portion]) -> None:
        names = self.serving
        assert names, "nobody is left to submit to"
        if self.config.staleness and (first := [portion for portion in portions if not portion.start]):
            assert len(first) <= math.ceil(self.room / first[0].size), "more is sent than there is room for"
            self.room = 0
        loads = {name: len(self.members[name].running) for name in names}
        shares = assign([(len(portion), 1.0) for portion in portions], loads, spread=True)
        sent: list[tuple[Worker, GroupId, int]] = []
        for portion, share in zip(portions, shares, strict=True):
            before = self.issued.setdefault(portion.group, set())
            fresh = set(range(portion.start, portion.stop))
            assert not before & fresh, f"{portion.group}: {before & fresh} are issued twice"
            before |= fresh
            self.sizes[portion.group] = portion.size
            for name, places in share.items():
                self.members[name].groups.add(portion.group)
                sent += [(self.members[name], portion.group, portion.start + place) for place in places]
        await self.awhile()  # on its way to the workers
        for worker, group, index in sent:
            worker.running[group, index] = self.version if self.chance(0.7) else None

    async def wait_for_room(self, places: int, timeout: float) -> int:
        await self.awhile()
        await asyncio.sleep(0)
        self.room = sum(max(0, places - len(self.members[name].running)) for name in self.serving)
        return self.room

    async def abort(self, groups: Sequence[GroupId]) -> None:
        await self.awhile()
        for worker in self.members.values():
            worker.aborted |= {rollout for rollout in worker.running if rollout[0] in groups}

    async def keep(self, selections: Sequence[Selection]) -> None:
        kept = {(locator.group, locator.index) for selection in selections for locator in selection.locators}
        groups = {selection.group for selection in selections}
        self._forget(lambda rollout: rollout[0] in groups and rollout not in kept)

    async def drop(self, groups: Sequence[GroupId]) -> None:
        await self.awhile(self.aside)
        self._forget(lambda rollout: rollout[0] in groups)
        for worker in self.members.values():
            worker.groups -= set(groups)

    def _forget(self, unwanted: Any) -> None:
        for worker in self.members.values():
            worker.running = {rollout: version for rollout, version in worker.running.items() if not unwanted(rollout)}
            worker.held = {rollout: version for rollout, version in worker.held.items() if not unwanted(rollout)}
            worker.aborted = {rollout for rollout in worker.aborted if not unwanted(rollout)}

    async def sample(self, group: GroupId) -> list[Rollout]:
        return []

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[Any]:
        return []

    async def check(self) -> list[Failure]:
        await self.awhile()
        dead = [name for name, worker in self.members.items() if worker.dead]
        return [self._discard(name, "died") for name in dead]

    async def observe(self) -> None:
        pass

    async def fail(self, worker: str, reason: str) -> list[Failure]:
        return [self._discard(worker, reason)] if worker in self.members else []

    def _discard(self, name: str, reason: str) -> Failure:
        worker = self.members.pop(name)
        return Failure(name, reason, sorted(worker.groups), leaving=worker.draining)

    async def replace(self, worker: str) -> str:
        await self.awhile()
        return self.join()

    async def stats(self) -> PoolStats:
        return PoolStats({})

    async def close(self) -> None:
        pass

    # Membership.

    @property
    def serving(self) -> list[str]:
        return [name for name, worker in self.members.items() if not worker.draining]

    def states(self) -> Mapping[str, WorkerStatus]:
        return {
            name: WorkerStatus(WorkerPhase.LEAVING if worker.draining else WorkerPhase.SERVING)
            for name, worker in self.members.items()
        }

    async def prepare(self, placement: float) -> str:
        await self.awhile()
        if self.chance(0.2):
            raise GeneratorError("it did not start")
        self.starting.add(name := self._name())
        return name

    def prepared_worker(self, name: str) -> Any:
        assert name in self.starting
        return name

    def admit(self, name: str) -> None:
        self.starting.remove(name)
        self.members[name] = Worker()

    def withdraw(self, name: str) -> None:
        self.starting.discard(name)

    def retire(self, count: int) -> list[str]:
        assert 0 < count < len(self.serving)
        leaving = self.random.sample(self.serving, count)
        for name in leaving:
            self.members[name].draining = True
        return leaving

    async def drain(self, name: str, timeout: float) -> None:
        """Until it is empty, or for so many turns."""
        for _ in range(self.random.choice([3, 200])):
            worker = self.members.get(name)
            if worker is None or worker.dead or not (worker.running or worker.held):
                return
            await asyncio.sleep(0)

    async def dismiss(self, name: str) -> Failure | None:
        await self.awhile()
        return self._discard(name, "left") if name in self.members else None

    # Publisher.

    async def publish(self, version: int, workers: Mapping[str, Any]) -> PublishReport:
        for _ in range(self.random.randrange(3)):
            self.tick()
            await self.awhile()
        self.version = version
        failed = {name: "refused" for name in workers if self.chance(self.chances.refuse_weights)}
        failed |= {name: "dead" for name in workers if (worker := self.members.get(name)) is not None and worker.dead}
        return PublishReport(version, 0.01, 100, failed, False, 1)

    async def catch_up(self, version: int, name: str, worker: Any) -> PublishReport:
        return PublishReport(version, 0.01, 100, {}, True, 1)

    async def use_ranks(self, ranks: Sequence[Any]) -> None: ...


class Asking(CoreSelector):
    """The real core; every question to it lets the world go on."""

    world: World
    patience: float = 0.3
    """Share of the questions at which newer groups may not overtake the oldest."""

    async def collect(self, want: int, version: int, timeout: float) -> Any:
        self.world.tick()
        await self.world.awhile()
        straggling = self.staleness > 0 and self.world.chance(self.patience)
        return self.core.collect(want, version, self.staleness, oldest_only=straggling)

    async def instructions(self, timeout: float) -> Any:
        await asyncio.sleep(0)
        return self.core.instructions()


class Trainer(Learners):
    """Takes what it trains from the workers, and holds every rollout against the staleness bound."""

    def __init__(self, world: World, staleness: int) -> None:
        super().__init__()
        self.world, self.staleness = world, staleness
        self.version = 0
        self.trained: list[GroupId] = []

    async def train(self, selections: list[Selection], step: int) -> StepResult:
        for _ in range(self.world.random.randrange(4)):  # the generators go on meanwhile
            self.world.tick()
            await self.world.awhile()
        for selection in selections:
            for locator in selection.locators:
                worker = self.world.members.get(locator.worker)
                gone = worker is None or worker.dead or self.world.chance(self.world.chances.lose_on_the_way)
                version = None if gone or worker is None else worker.held.pop((locator.group, locator.index), None)
                if version is None:
                    gone_group = selection.group
                    self.lose = lambda group, lost=gone_group, before=self.lose: group == lost or before(group)
                    continue
                assert self.version - version <= self.staleness, f"{locator}: {version} at {self.version}"
        result = await super().train(selections, step)
        self.lose = lambda group: False
        self.trained += result.trained
        self.version += bool(result.trained_rollouts)
        return result


class Recorder:
    """Takes only registered metrics."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.events: list[str] = []

    def step(self, step: int, values: dict[str, float]) -> None:
        registry.check(values)
        self.records.append(values)

    def event(self, kind: str, text: str, **more: Any) -> None:
        self.events.append(kind)

    def samples(self, step: int, groups: Any) -> None: ...


class Book(Ledger):
    """Remembers who had which end."""

    def __init__(self, prompts_per_step: int, staleness: int) -> None:
        super().__init__(prompts_per_step, staleness)
        self.ends: dict[GroupId, Fate] = {}

    def end(self, group: GroupId, fate: Fate) -> None:
        assert group not in self.ends, f"{group} has two fates"
        assert len(self.in_flight) <= self.capacity
        self.ends[group] = fate
        super().end(group, fate)


class Life:
    """A run in such a world, and a book of every fate."""

    def __init__(self, config: Config, chances: Chances, seed: int, folder: Path) -> None:
        self.selector = Asking(config)
        self.world = self.selector.world = World(config, self.selector, chances, seed)
        self.learners = Trainer(self.world, config.staleness)
        self.stream = Stream()
        self.recorder = Recorder()
        self.run = Run(
            config,
            pool=self.world,
            selector=self.selector,
            learners=self.learners,
            publisher=self.world,
            stream=cast(Any, self.stream),
            held_out=[],
            recorder=cast(Any, self.recorder),
            folder=RunFolder(folder),
        )
        self.run.saver.save = _nothing  # type: ignore[method-assign]
        self.run.saver.save_last = _nothing  # type: ignore[method-assign]
        self.world.scale = lambda workers: self.run.scaler.request(workers, None)
        self.book = Book(config.learner.prompts_per_step, config.staleness)
        self.run.ledger = self.run.assembler.groups.ledger = self.book

    @property
    def fates(self) -> dict[GroupId, Fate]:
        return self.book.ends

    def main(self) -> None:
        asyncio.run(self.run.main())


async def _nothing(*state: Any) -> None: ...
