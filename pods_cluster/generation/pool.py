"""The generator pool, driven from the controller's event loop: placement, distribution of groups, health."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pods_cluster.config import Config
from pods_cluster.generation.distribute import assign, relative_rates
from pods_cluster.generation.members import Member, TakePrinted
from pods_cluster.generation.messages import EvalRow, Failure, GeneratorError, GroupRequest, Portion, WorkerStats
from pods_cluster.generation.placement import ANSWER_SECONDS
from pods_cluster.generation.pool_calls import PoolCalls, error_of
from pods_cluster.generation.pool_stats import PoolStats, counters
from pods_cluster.generation.room_watch import RoomWatch
from pods_cluster.generation.thread_seconds import ThreadSeconds
from pods_cluster.types import GroupId, Prompt, Rollout, SamplingParams, Selection

BEGIN_AGAIN_SECONDS = 20.0
"""Time in which engines and scorers end rollouts that were given up, when a run goes on from another state."""

WHOLE_GROUPS = 4
"""Groups in flight a worker from which all workers are about equally busy without groups being divided."""


class GeneratorPool(PoolCalls):
    """`generator.workers` workers `<run>/generator/<i>`; a replacement gets a new index.

    `selector` is the handle that workers report to (None: an evaluation alone). `actor_options` go to every worker's
    actor, `printed` gets what rewards print. Errors of workers that are gone do not raise here: `check` finds them.
    """

    def __init__(
        self,
        config: Config,
        selector: Any,
        *,
        actor_options: Mapping[str, Any] | None = None,
        printed: TakePrinted | None = None,
    ) -> None:
        super().__init__(config, selector, actor_options, printed)
        self._last: dict[str, WorkerStats] = {}
        self._room = RoomWatch()
        self._asked_at = time.monotonic()

    async def adopt_version(self, version: int) -> None:
        """All workers serve the weights that they loaded from `model.path` as `version`; for runs without a learner."""
        await self.ask_all(
            {name: member.handle.adopt_version.remote(version) for name, member in self._members.items()}
        )

    # Groups.

    async def submit(self, portions: Sequence[Portion]) -> None:
        """Send portions of groups to the workers that would end them first, by their outstanding tokens and their measured
        rates; those with the most tokens to make first.

        Raises what an engine has against a request. What is sent to a worker that turns out to be dead is reported by
        `check`, as if it had died a moment later.
        """
        for portion in portions:
            if portion.start:  # the earlier ones have all come back
                for member in self._members.values():
                    member.load.pop(portion.group, None)
        there = {name: m for name, m in self._members.items() if not m.draining}
        # Where all have failed one stands in for the worker that `check` will have put in its place.
        takers = {name: m for name, m in there.items() if not m.failure} or there
        if not takers:
            raise GeneratorError("no generator worker is left to submit to")
        longest = self.config.generator.max_tokens
        ordered = sorted(((longest if p.length is None else p.length, p) for p in portions),
                         key=lambda item: -len(item[1]) * item[0])  # fmt: skip
        shares = self._shares([(len(portion), length) for length, portion in ordered], takers)
        sampling = self._sampling()
        parts: dict[str, list[GroupRequest]] = {}
        for (length, portion), share in zip(ordered, shares, strict=True):
            for name, places in share.items():
                indices = tuple(portion.start + place for place in places)
                parts.setdefault(name, []).append(
                    GroupRequest(portion.group, portion.prompt, indices, portion.size, sampling)
                )
                member = self._members[name]
                member.groups.add(portion.group)
                member.load[portion.group] = round(len(indices) * length)
                member.sampling += len(indices)
        sound = self.sound()
        await self.ask_all(
            {name: sound[name].handle.submit.remote(part) for name, part in parts.items() if name in sound}
        )

    async def begin_again(self, selector: Any) -> list[Failure]:
        """All workers forget every group and report to `selector` from now on: the run goes on from another state.

        Those that are gone, or have not ended what they were making within `BEGIN_AGAIN_SECONDS`, are ended and returned.
        """
        self._selector = selector
        sound = self.sound()
        calls = {
            name: member.handle.begin_again.remote(selector, BEGIN_AGAIN_SECONDS) for name, member in sound.items()
        }
        patience = BEGIN_AGAIN_SECONDS + ANSWER_SECONDS
        answers = await asyncio.gather(*(error_of(calls[name], patience, sound[name].process) for name in calls))
        for name, error in zip(calls, answers, strict=True):
            if error is not None and name in self._members:
                self._members[name].failure = error
        for starting in self._starting.values():  # it has nothing yet, and would report to the selector before
            starting.handle.begin_again.remote(selector, BEGIN_AGAIN_SECONDS)
        for member in self._members.values():
            member.groups.clear()
            member.load.clear()
            member.sampling = 0
        return [self._discard(name, member.failure) for name, member in list(self._members.items()) if member.failure]

    async def report_again(self, selector: Any, groups: Sequence[GroupId]) -> None:
        """All workers report to `selector` from now on, which knows these groups, first what they hold of them already.

        A worker that does not answer is reported by `check`.
        """
        self._selector = selector
        sound = self.sound()
        calls = {
            name: member.handle.report_again.remote(selector, [group for group in groups if group in member.groups])
            for name, member in sound.items()
        }
        answers = await asyncio.gather(*(error_of(calls[name], ANSWER_SECONDS, sound[name].process) for name in calls))
        for name, error in zip(calls, answers, strict=True):
            if error is not None and name in self._members:
                self._members[name].failure = error
        for starting in self._starting.values():
            starting.handle.report_again.remote(selector, [])

    async def wait_for_room(self, places: int, timeout: float) -> int:
        """Wait until engines of serving workers have fewer than `places` rollouts, at most `timeout` seconds; how many
        more fit into those that said so."""
        serving = {name: m.handle for name, m in self.sound().items() if not m.draining}
        found = await self._room.wait(serving, places, timeout)
        for name, count in found.items():
            if name in self._members:
                self._members[name].sampling = count
        return sum(max(0, places - count) for count in found.values())

    async def close(self) -> None:
        """End all workers."""
        self._room.close()
        await super().close()

    async def abort(self, groups: Sequence[GroupId]) -> None:
        """Workers end what is unfinished of these groups; it is reported as aborted. Finished rollouts stay."""
        holders = [(group, self._members[name]) for group in groups for name in self._holders(group)]
        await asyncio.gather(*(self.answer(member, member.handle.abort.remote(group)) for group, member in holders))

    async def keep(self, selections: Sequence[Selection]) -> None:
        """Workers forget what these selections left out; what they kept stays until it is taken or dropped."""
        wanted: dict[str, list[tuple[GroupId, tuple[int, ...]]]] = {}
        for selection in selections:
            kept: dict[str, list[int]] = {}
            for locator in selection.locators:
                kept.setdefault(locator.worker, []).append(locator.index)
            for name in self._holders(selection.group):
                self._members[name].load.pop(selection.group, None)
                wanted.setdefault(name, []).append((selection.group, tuple(kept.get(name, ()))))
        await self.tell({name: self._members[name].handle.keep.remote(part) for name, part in wanted.items()})

    async def drop(self, groups: Sequence[GroupId]) -> None:
        """Workers forget these groups and abort what is unfinished of them."""
        unwanted: dict[str, list[GroupId]] = {}
        for group in groups:
            for name in self._holders(group):
                self._members[name].load.pop(group, None)
                self._members[name].groups.discard(group)
                unwanted.setdefault(name, []).append(group)
        await self.tell({name: self._members[name].handle.drop.remote(part) for name, part in unwanted.items()})

    async def sample(self, group: GroupId) -> list[Rollout]:
        """Copies of the group's finished rollouts, by index; empty where their worker is gone."""
        holders = [self._members[name] for name in self._holders(group)]
        parts = await asyncio.gather(*(self.answer(member, member.handle.sample.remote(group)) for member in holders))
        return sorted((rollout for part in parts if part for rollout in part), key=lambda rollout: rollout.index)

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]:
        """`samples` scored completions of each prompt (0: one greedy), in the order of the prompts, over all workers.

        A part whose worker dies is made again by the others. Raises GeneratorError when none is left, or the cause.
        """
        rows: dict[int, EvalRow] = {}
        missing = list(range(len(prompts)))
        while missing:
            names = [name for name, member in self._members.items() if not member.failure]
            if not names:
                causes = "; ".join(f"{name}: {member.failure}" for name, member in self._members.items())
                raise GeneratorError(f"no generator worker is left to evaluate on ({causes or 'all are gone'})")
            parts = {name: missing[start :: len(names)] for start, name in enumerate(names)}
            calls = {
                name: self._members[name].handle.evaluate.remote([prompts[i] for i in part], sampling, samples)
                for name, part in parts.items()
                if part
            }
            answers = await self.ask_all(calls)
            for name, answer in answers.items():
                rows.update(zip(parts[name], answer, strict=True))
            missing = [index for index in missing if index not in rows]
        return [rows[index] for index in range(len(prompts))]

    # Health.

    async def check(self) -> list[Failure]:
        """Workers that died, failed or hang: ended, taken out of the pool, and reported once."""
        stats = await self.all_stats()
        failures = []
        for name, member in list(self._members.items()):
            if (complaint := member.failure or self.complaint(member, stats.get(name))) is not None:
                failures.append(self._discard(name, complaint))
        return failures

    async def observe(self) -> None:
        """Renew `scoring`, and fetch what rewards printed."""
        await self.all_stats()

    async def fail(self, worker: str, reason: str) -> list[Failure]:
        """End a worker that someone else has a complaint about (no weights taken, say) and take it out."""
        return [self._discard(worker, reason)] if worker in self._members else []

    async def stats(self) -> PoolStats:
        """Every worker that answers; counts are those since the last call."""
        workers, last = await self.all_stats(), self._last
        before = counters(last)
        since: Counter[str] = Counter(
            dict.fromkeys(("generator/preemptions", "tokens/prompt", "tokens/recomputed", "weights/staged"), 0)
            | {"generator/replaced": self._replaced}
        )
        for name, counts in counters(workers).items():
            since.update(counts - before.get(name, Counter()))
        seconds, self._asked_at = time.monotonic() - self._asked_at, time.monotonic()
        self._replaced, self._last = 0, workers

        def grown(count: Callable[[WorkerStats], float]) -> float:
            return sum(count(now) - (count(last[name]) if name in last else 0) for name, now in workers.items())

        threads = [(now, last[name].seconds if name in last else ThreadSeconds()) for name, now in workers.items()]
        return PoolStats(
            workers,
            since,
            generated_tokens=int(grown(lambda stats: stats.engine.generated_tokens)),
            seconds=seconds,
            busy_seconds=grown(lambda stats: stats.engine.busy_seconds),
            occupied_seconds=grown(lambda stats: stats.occupied_seconds),
            only_scoring_seconds=grown(lambda stats: stats.only_scoring_seconds),
            thread=sum((now.seconds - before for now, before in threads), start=ThreadSeconds()),
            staging_seconds=grown(lambda stats: stats.staging_seconds),
        )

    # Within.

    def _sampling(self) -> SamplingParams:
        config = self.config.generator
        return SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=self.config.run.seed,
            stop_token_ids=config.stop_ids,
            stop_strings=tuple(config.stop_strings),
        )

    def _shares(
        self, pieces: Sequence[tuple[int, float]], takers: Mapping[str, Member]
    ) -> list[dict[str, tuple[int, ...]]]:
        """For each piece (rollouts, tokens of one), the places in it that each of `takers` makes."""
        config = self.config.generator
        rates = relative_rates({name: (member.info.kind, member.rate) for name, member in takers.items()})
        if self.config.staleness:  # places come free one by one
            if len(set(rates.values())) > 1:  # a fast engine that is full is still the first to end
                places = config.places_per_worker(len(takers))
                takers = {name: member for name, member in takers.items() if member.sampling < places} or takers
            length = sum(count * length for count, length in pieces) / max(1, sum(count for count, _ in pieces))
            loads = {name: member.sampling * length for name, member in takers.items()}
            # A few groups at a time would each be divided among all workers: only where one does not fit, or where so few
            # are out that whole ones would leave workers without any.
            fits = max((count for count, _ in pieces), default=0) <= config.places_per_worker(len(takers)) / 2
            out = self.config.learner.prompts_per_step * (1 + self.config.staleness)
            whole = fits and len(pieces) < len(takers) and out >= WHOLE_GROUPS * len(takers)
            spread = config.spread and not whole
        else:
            loads = {name: sum(member.load.values()) for name, member in takers.items()}
            spread = config.spread
        return assign(pieces, loads, spread=spread, rates=rates)

    def _holders(self, group: GroupId) -> list[str]:
        """Workers without a complaint that may have something of the group."""
        return [name for name, member in self.sound().items() if group in member.groups]
