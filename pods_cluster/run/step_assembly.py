"""One step's groups: issued, waited for, replaced where they teach nothing, until the step is full or given up."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pods_cluster.config import Config
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.distribute import ExpectedLengths
from pods_cluster.generation.messages import Failure, Portion
from pods_cluster.run.stages import Generators, Selector
from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.run.step_numbers import Tally
from pods_cluster.types import Fate, GroupId, Prompt, Selection

POLL_SECONDS = 1.0
"""How long one question to the selector waits; when it brings nothing the workers' health is looked at."""
LOOK_SECONDS = 5.0
"""So often it is looked at while the questions bring something."""


class RunError(Exception):
    """The run cannot go on; the text says what it waited for, or why it failed."""


@dataclass(slots=True)
class Assembler:
    """Keeps the ledger's places filled and collects steps from the selector.

    `out` are the prompts of groups that hold a place, for giving back. `notice` is told what a person should know.
    """

    config: Config
    pool: Generators
    selector: Selector
    stream: PromptStream
    ledger: Ledger
    notice: Callable[[str, str], None]
    stopping: Callable[[], bool]
    on_failure: Callable[[Failure], Awaitable[None]]
    on_selected: Callable[[Selection], Awaitable[None]]
    """Sees a selection while the whole group still lies with its workers."""
    size: int
    """n: rollouts of the groups issued from now on."""
    out: dict[GroupId, Prompt] = field(default_factory=dict)
    sizes: dict[GroupId, int] = field(default_factory=dict)
    attempts: Counter[tuple[int, int]] = field(default_factory=Counter)
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    _hands: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while `attend` sends something, and while groups are given up or a worker is replaced: nothing is sent for
    a group that is on its way out, nor to a worker without weights."""

    async def issue(self, count: int, version: int) -> None:
        """Send `count` more prompts to the generators (as many as the ledger has room for)."""
        count = min(count, self.ledger.room)
        if count <= 0:
            return
        groups: list[tuple[GroupId, Prompt]] = []
        for prompt in self.stream.next(count):
            row = (prompt.epoch, prompt.row)
            group = GroupId(*row, self.attempts[row])
            self.attempts[row] += 1
            self.ledger.issue(group, version)
            self.out[group] = prompt
            self.sizes[group] = self.size
            groups.append((group, prompt))
        first = await self.selector.expect([(group, self.size) for group, _ in groups])
        await self.pool.submit(
            [
                Portion(group, prompt, self.size, 0, count, self.lengths.expected(prompt.row))
                for (group, prompt), count in zip(groups, first, strict=True)
            ]
        )

    async def attend(self) -> None:
        """Pass on, without end, what the selector asks of the generators, also while the learner trains.

        Raises what the selector or the pool raises.
        """
        while True:
            instructions = await self.selector.instructions(POLL_SECONDS)
            async with self._hands:
                # Since the selector's answer a group may have been given up.
                portions = [
                    Portion(
                        wave.group,
                        self.out[wave.group],
                        self.sizes[wave.group],
                        wave.start,
                        wave.stop,
                        wave.mean_length if math.isfinite(wave.mean_length) else self.lengths.expected(wave.group.row),
                    )
                    for wave in instructions.waves
                    if wave.group in self.out
                ]
                if portions:
                    await self.pool.submit(portions)
                if aborted := [group for group in instructions.abort if group in self.out]:
                    await self.pool.abort(aborted)

    def end(self, group: GroupId, fate: Fate) -> None:
        """The group gives back its place."""
        self.ledger.end(group, fate)
        prompt = self.out.pop(group)
        del self.sizes[group]
        if fate is Fate.CANCELLED:
            # given up before its time: the same attempt, with the same random streams, when the run goes on
            self.attempts[(prompt.epoch, prompt.row)] -= 1
        elif fate is not Fate.LOST:
            # the row will not be tried again this epoch; forget its attempts so that the table stays small
            self.attempts.pop((prompt.epoch, prompt.row), None)

    def attempts_to_save(self) -> list[list[int]]:
        """Attempts by row for a checkpoint, in which the groups that are out now have not been tried."""
        left = Counter(self.attempts)
        left.subtract((prompt.epoch, prompt.row) for prompt in self.out.values())
        return [[epoch, row, count] for (epoch, row), count in left.items() if count > 0]

    async def give_back(self, groups: list[GroupId], fate: Fate) -> None:
        """End groups whose prompts are to be served again: their worker died, or the run stops."""
        async with self._hands:
            await self._give_back(groups, fate)

    async def _give_back(self, groups: list[GroupId], fate: Fate) -> None:
        prompts = [self.out[group] for group in groups]
        await self.selector.cancel(groups)
        await self.pool.drop(groups)
        for group in groups:
            self.end(group, fate)
        self.stream.give_back(prompts)

    async def collect(self, version: int, tally: Tally) -> list[Selection]:
        """The step's selections, at most `prompts_per_step`; fewer where replacements ran out, none when stopping.

        Raises RunError when `run.step_timeout` passes without a full step.
        """
        want = self.config.learner.prompts_per_step
        replacements = self.config.selector.max_replacements * want
        selections: list[Selection] = []
        deadline = time.monotonic() + self.config.run.step_timeout
        looked = time.monotonic()
        while len(selections) < want and not self.stopping():
            decision = await self.selector.collect(want - len(selections), version, POLL_SECONDS)
            tally.overtaken = decision.overtaken
            tally.waited += decision.waited
            tally.select_seconds += decision.select_seconds
            tally.selector_bytes = max(tally.selector_bytes, decision.resident_bytes)
            tally.queued = decision.ready
            if tally.ready is None:
                tally.ready = len(decision.selections) + decision.ready
            for selection, stats in zip(decision.selections, decision.stats, strict=True):
                self.lengths.seen(selection.group.row, stats.length_mean)
            if decision.selections:
                selections.extend(decision.selections)
                tally.selected(decision.selections, decision.stats)
                for selection in decision.selections:
                    await self.on_selected(selection)
                await self.pool.keep(decision.selections)
            unserved = 0
            for ended in decision.fates:
                self.end(ended.group, ended.fate)
                tally.ended(ended.fate, ended.stats)
                self.lengths.seen(ended.group.row, ended.stats.length_mean)
                replace = ended.fate is not Fate.NO_SIGNAL or self.config.selector.no_signal == "replace"
                if replace and tally.replaced < replacements:
                    tally.replaced += 1
                    unserved += 1
                else:
                    want -= 1
            if decision.fates:
                await self.pool.drop([ended.group for ended in decision.fates])
                await self.issue(unserved, version)
            nothing_new = not decision.selections and not decision.fates
            if nothing_new or time.monotonic() - looked >= LOOK_SECONDS:
                await self._look_after_workers(version, selections)
                looked = time.monotonic()
            if time.monotonic() > deadline:
                raise RunError(self._overdue(len(selections), want))
        return selections

    async def _look_after_workers(self, version: int, selections: list[Selection]) -> None:
        for failure in await self.pool.check():
            # Of groups that are selected already the learner finds out what it can still take.
            selected = {selection.group for selection in selections}
            lost = [group for group in self.held_by(failure) if group not in selected]
            self.notice("worker_failed", f"{failure.worker}: {failure.cause}; {len(lost)} group(s) go to other workers")
            await self.lose_worker(failure, lost)
            await self.issue(len(lost), version)

    def held_by(self, failure: Failure) -> list[GroupId]:
        """Groups that hold a place and had rollouts with the worker that is gone."""
        return [group for group in failure.groups if group in self.out]

    async def lose_worker(self, failure: Failure, lost: list[GroupId]) -> None:
        """A worker is gone and with it `lost`: their prompts are served again, another worker takes its place."""
        async with self._hands:
            await self.selector.mark_lost(failure.worker)
            await self._give_back(lost, Fate.LOST)
            await self.on_failure(failure)

    def _overdue(self, got: int, want: int) -> str:
        waiting = ", ".join(str(group) for group in list(self.ledger.out)[:8])
        return (
            f"run.step_timeout: {self.config.run.step_timeout:g} s passed and the step has {got} of {want} groups; "
            f"waiting for {len(self.ledger.out) - got} group(s) ({waiting} …) on {len(self.pool.workers)} worker(s); "
            f"raise run.step_timeout, lower generator.max_tokens or add generators"
        )
