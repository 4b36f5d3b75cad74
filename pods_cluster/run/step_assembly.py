"""Assembly of a step: groups are issued, waited for, and replaced where they teach nothing, until the step is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from pods_cluster.config import Config
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.distribute import ExpectedLengths
from pods_cluster.generation.messages import Failure, Portion
from pods_cluster.run.continuous_issue import ContinuousIssue
from pods_cluster.run.errors import RunError, step_overdue
from pods_cluster.run.instructions import POLL_SECONDS, pass_instructions
from pods_cluster.run.issued_groups import IssuedGroups
from pods_cluster.run.prompt_history import PromptHistory
from pods_cluster.run.prompt_supply import PromptSupply
from pods_cluster.run.reward_watch import RewardWatch
from pods_cluster.run.stages import Generators, Selector
from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.run.step_numbers import Tally
from pods_cluster.selection.select import NO_SIGNAL_SPREAD
from pods_cluster.selection.selector_core import GroupFate
from pods_cluster.types import Fate, GroupId, Prompt, Selection
from pods_cluster.wording import counted

CHECK_SECONDS = 5.0
"""Time between two checks of the workers' health while the questions bring something."""


class Assembler:
    """Keeps the ledger's slots filled and collects steps from the selector.

    It holds the prompt of every group in flight, so that it can be served again, and counts the attempts at each row.
    `supply` chooses the prompts and remembers what is known of them. `rewards` tells of rewards that fail, `notice` of what
    happened, `stopping` says whether the run is to end. `on_failure` puts another worker in place of one that is gone.
    `on_selected` sees a selection, and `on_dropped` a group that is not trained, while the whole group still lies with its
    workers.
    """

    def __init__(
        self,
        config: Config,
        pool: Generators,
        selector: Selector,
        stream: PromptStream,
        ledger: Ledger,
        *,
        rewards: RewardWatch,
        notice: Callable[..., None],
        stopping: Callable[[], bool],
        on_failure: Callable[[Failure], Awaitable[None]],
        on_selected: Callable[[Selection], Awaitable[None]],
        on_dropped: Callable[[GroupFate], Awaitable[None]],
    ) -> None:
        self.config = config
        self.pool, self.selector = pool, selector
        self.supply = PromptSupply(stream, notice, PromptHistory.of(config))
        self.rewards, self._notice, self._stopping = rewards, notice, stopping
        self._on_failure, self._on_selected, self._on_dropped = on_failure, on_selected, on_dropped
        self._group_size = config.generator.rollouts_per_prompt
        self.groups = IssuedGroups(ledger)
        self._ended_now: list[tuple[int, GroupId, Prompt, Fate]] = []  # in the step that is being collected
        self._lengths = ExpectedLengths()
        # Held while instructions are passed on, and while groups are given up or a worker is replaced: nothing is sent
        # for a group that is being given up, nor to a worker without weights.
        self._sending = asyncio.Lock()
        self._keeping: asyncio.Future[None] | None = None  # the workers' answers to `keep`: no step waits for them
        self.continuous = ContinuousIssue(
            config,
            pool,
            free=lambda: self.ledger.free,
            issue=self._issue,
            group_size=lambda: self._group_size,
            lock=self._sending,
        )

    @property
    def ledger(self) -> Ledger:
        """The slots of the groups in flight."""
        return self.groups.ledger

    def set_group_size(self, rollouts: int) -> None:
        """Issue groups of so many rollouts (n) from now on."""
        self._group_size = rollouts

    def prompt_of(self, group: GroupId) -> Prompt:
        """The prompt of a group in flight."""
        return self.groups.prompt(group)

    def prompts_in_flight(self) -> list[Prompt]:
        """Prompts of all groups that hold a slot, oldest first, and of those that are held back."""
        return [*self.groups.prompts(), *self.supply.held]

    async def fill(self, version: int) -> None:
        """Begin a step: the free slots of the ledger may be filled. The generators serve weight `version` now.

        With staleness 0 they are filled at once, else as the engines have room (`continuous`).
        """
        self.supply.begin_step()
        self.rewards.begin_step()
        self.continuous.serve(version)
        await self._refill(self.ledger.free, version)

    async def collect(self, version: int, tally: Tally) -> list[Selection]:
        """Wait for the step's selections: `prompts_per_step`, fewer where replacements ran out, none when stopping.

        Woken by the selector when it has something, at least each POLL_SECONDS. Raises RunError when generators fail on and
        on, or `run.step_timeout` passes without a full step, and RewardsFail when rewards let none come.
        """
        want = self.config.learner.prompts_per_step
        replacements = self.config.selector.max_replacements * want
        self._ended_now.clear()
        selections: list[Selection] = []
        deadline = time.monotonic() + self.config.run.step_timeout
        checked = time.monotonic()
        while len(selections) < want and not self._stopping():
            decision = await self.selector.collect(want - len(selections), version, POLL_SECONDS)
            tally.answered(decision)
            for selection, stats in zip(decision.selections, decision.stats, strict=True):
                self._lengths.seen(selection.group.row, stats.length_mean)
                # with `no_signal: keep` groups without one are selected too
                spread = float(selection.rewards.max() - selection.rewards.min())
                self.supply.saw(selection.group, stats, signal=spread > NO_SIGNAL_SPREAD)
            self.supply.finished([item.group for item in (*decision.selections, *decision.fates)])
            if decision.selections:
                selections.extend(decision.selections)
                tally.selected(decision.selections, decision.stats)
                for selection in decision.selections:
                    await self._on_selected(selection)
                await self._until_kept()
                self._keeping = asyncio.ensure_future(self.pool.keep(decision.selections))
            unserved = 0
            for ended in decision.fates:
                await self._on_dropped(ended)  # while the workers still hold its rollouts
                self._ended_now.append(
                    (self.groups.place(ended.group), ended.group, self.groups.prompt(ended.group), ended.fate)
                )
                self._end(ended.group, ended.fate)
                tally.ended(ended.fate, ended.stats)
                self._lengths.seen(ended.group.row, ended.stats.length_mean)
                if ended.fate is Fate.NO_SIGNAL:
                    self.supply.saw(ended.group, ended.stats, signal=False)
                replace = ended.fate is not Fate.NO_SIGNAL or self.config.selector.no_signal == "replace"
                if replace and tally.replaced < replacements:
                    tally.replaced += 1
                    unserved += 1
                else:
                    want -= 1
            if decision.fates:
                await self.pool.drop([ended.group for ended in decision.fates])
                await self._refill(unserved, version)
            await self._refill(self.supply.deferred(), version)
            nothing_new = not decision.selections and not decision.fates
            if nothing_new or time.monotonic() - checked >= CHECK_SECONDS:
                await self._check_workers(version, selections)
                checked = time.monotonic()
            if time.monotonic() > deadline:
                waiting, failures = list(self.ledger.in_flight), self.rewards.describe()
                raise step_overdue(self.config, len(selections), want, waiting, len(self.pool.workers), failures)
        if not self._stopping():
            self._ended_now.clear()
        # They came as groups ended, and the learner's sums depend on their order.
        return sorted(selections, key=lambda selection: self.groups.place(selection.group))

    async def pass_instructions(self) -> None:
        """Pass the selector's instructions about groups in flight on to the generators, without end.

        It goes on while the learner trains. Raises what the selector or the pool raises.
        """
        await pass_instructions(self.selector, self.pool, self.groups, self._lengths, self._sending)

    def end_trained(self, groups: Iterable[GroupId]) -> None:
        """Give back the slots of groups that were trained."""
        for group in groups:
            self._end(group, Fate.TRAINED)

    async def return_lost(self, groups: Sequence[GroupId]) -> None:
        """Give up groups that were lost: their prompts are served again as other attempts."""
        async with self._sending:
            await self._give_up(groups, Fate.LOST)

    async def cancel_all(self, *, told: bool = True) -> None:
        """Give up every group in flight, and issue no more: the prompts are served again as the same attempts when the
        run goes on. `told=False`: neither the selector nor the generators are, as one of them is gone.

        So are those of groups that ended in a step which is not made any more, as without them it would be another step.
        """
        self.continuous.end()
        await self._until_kept()
        async with self._sending:
            order = {group: self.groups.place(group) for group in self.groups}
            self.supply.give_back_held()
            prompts = await self._cancel(list(self.groups), Fate.CANCELLED, told=told)
        for place, group, prompt, fate in self._ended_now:
            self.groups.undo_end(group, fate)
            order[group], prompts[group] = place, prompt
        self._ended_now.clear()
        self.supply.give_back({group: prompts[group] for group in sorted(prompts, key=lambda group: order[group])})

    async def lose_worker(
        self, failure: Failure, selected: Collection[GroupId] = (), *, engine_failed: bool = False
    ) -> int:
        """Give up the groups that had rollouts with a worker that is gone, and have another one take its place.

        Groups that are `selected` already stay: the learner finds out what it can still take. `engine_failed`: a prompt may
        be the cause. Returns how many groups were given up. Raises RunError when engines fail on and on.
        """
        async with self._sending:
            lost = self._lost_with(failure, selected)
            await self.selector.mark_lost(failure.worker)
            await self._give_up(lost, Fate.LOST, failure if engine_failed else None)
            await self._on_failure(failure)
        return len(lost)

    def attempts_to_save(self) -> list[list[int]]:
        """[epoch, row, count] of each row that was tried, for a checkpoint; groups in flight count as not tried."""
        return self.groups.attempts_to_save()

    def restore_attempts(self, attempts: Iterable[Sequence[int]]) -> None:
        """Go on with the attempts of a checkpoint, whose stream has been restored."""
        self.supply.count_from_here()
        self.groups.restore_attempts(attempts)

    async def _until_kept(self) -> None:
        """Wait for the answers of workers that were told what to keep."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            await keeping

    async def _refill(self, count: int, version: int) -> None:
        """`count` slots may be filled: at once, or as the engines have room."""
        if self.continuous.on:
            self.continuous.look()
        else:
            await self._issue(count, version)

    async def _issue(self, count: int, version: int) -> int:
        """Send `count` more prompts to the generators, as far as the ledger has free slots; how many were sent."""
        count = min(count, self.ledger.free)
        prompts = self.supply.next(count) if count > 0 else []
        if not prompts:
            return 0
        size = self._group_size
        groups: list[tuple[GroupId, Prompt]] = []
        for prompt in prompts:
            group = self.groups.begin(prompt, size, version)
            self.supply.issued(group)
            groups.append((group, prompt))
        first = await self.selector.expect([(group, size) for group, _ in groups])
        # All were found dead, and whoever found it waits to replace them.
        if self.continuous.on and not self.pool.serving:
            await self._give_up([group for group, _ in groups], Fate.LOST)
            return 0
        await self.pool.submit(
            [
                Portion(group, prompt, size, 0, stop, self._lengths.expected(prompt.row))
                for (group, prompt), stop in zip(groups, first, strict=True)
            ]
        )
        return len(groups)

    def _end(self, group: GroupId, fate: Fate) -> None:
        self.groups.end(group, fate)
        self.continuous.look()

    async def _cancel(self, groups: Sequence[GroupId], fate: Fate, *, told: bool = True) -> dict[GroupId, Prompt]:
        """End these groups everywhere; returns their prompts, which are to be given back."""
        prompts = {group: self.groups.prompt(group) for group in groups}
        if told:
            await self.selector.cancel(groups)
            await self.pool.drop(groups)
        for group in groups:
            self._end(group, fate)
        return prompts

    async def _give_up(self, groups: Sequence[GroupId], fate: Fate, failure: Failure | None = None) -> None:
        """`failure`: the engine's, where one of the prompts may be its cause."""
        prompts = await self._cancel(groups, fate)
        if failure is None:
            self.supply.give_back(prompts)
            return
        if cause := self.supply.lost(prompts, failure):
            self.groups.forget(cause)
        if self.supply.hopeless or self.supply.failures_in_a_row >= self.config.generator.max_failures:
            raise RunError(self.supply.describe_failures(failure))

    async def _check_workers(self, version: int, selections: list[Selection]) -> None:
        selected = {selection.group for selection in selections}
        failures = await self.pool.check()
        self.rewards.look(self.pool.scoring)
        for failure in failures:
            lost = len(self._lost_with(failure, selected))
            self._notice(
                "worker_failed", f"{failure.worker}: {failure.cause}; other workers take {counted(lost, 'group')}"
            )
            await self._refill(await self.lose_worker(failure, selected, engine_failed=True), version)

    def _lost_with(self, failure: Failure, selected: Collection[GroupId]) -> list[GroupId]:
        return [group for group in failure.groups if group in self.groups and group not in selected]
