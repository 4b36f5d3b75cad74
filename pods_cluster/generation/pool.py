"""The generator pool, driven from the controller's event loop: placement, distribution of groups, health."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from pods_cluster.config import Config
from pods_cluster.generation.distribute import assign
from pods_cluster.generation.placement import (
    ANSWER_SECONDS,
    cause,
    create_worker,
    kill,
    quietly,
    result,
    worker_started,
)
from pods_cluster.generation.pool_stats import PoolStats, counters
from pods_cluster.generation.records import EvalRow, Failure, GeneratorError, GroupRequest, WorkerStats
from pods_cluster.names import actor_name
from pods_cluster.types import GroupId, Prompt, Rollout, SamplingParams, Selection

CLOSE_SECONDS = 15.0


@dataclass(slots=True)
class _Member:
    """A worker: `load` are outstanding tokens by group, `groups` all that may have rollouts there."""

    handle: Any
    load: dict[GroupId, int] = field(default_factory=dict)
    groups: set[GroupId] = field(default_factory=set)
    draining: bool = False
    unanswered: int = 0
    failure: str | None = None


class GeneratorPool:
    """`generator.workers` workers `<run>/generator/<i>`; a replacement gets a new index.

    `selector` is the handle that workers report to (None: an evaluation alone). A group stays whole on one worker;
    `spread` divides the rollouts of a group where there are fewer groups than workers. `actor_options` go to every
    worker's actor. Errors of workers that are gone do not raise here: `check` finds them.
    """

    def __init__(
        self, config: Config, selector: Any, *, spread: bool = False, actor_options: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self._selector = selector
        self._spread = spread
        self._options = dict(actor_options or {})
        self._members: dict[str, _Member] = {}
        self._next = 0
        self._replaced = 0
        self._read: dict[str, Counter[str]] = {}

    @property
    def workers(self) -> dict[str, Any]:
        """Handles of the workers that serve, by name."""
        return {name: member.handle for name, member in self._members.items()}

    # Starting, growing, ending.

    async def start(self) -> None:
        """Start all workers and wait for their engines. Raises GeneratorError with the cause; none is left then."""
        await self.add(self.config.generator.workers)

    async def add(self, count: int = 1) -> list[str]:
        """Start `count` more workers, without published weights. Raises GeneratorError; none of them is left then."""
        new: dict[str, Any] = {}
        try:
            for name in self._names(count):
                new[name] = create_worker(self.config, name, self._selector, self._options)
            await asyncio.gather(*(worker_started(self.config, name, handle) for name, handle in new.items()))
        except BaseException:
            for handle in new.values():
                kill(handle)
            raise
        self._members.update((name, _Member(handle)) for name, handle in new.items())
        return list(new)

    async def remove(self, count: int = 1, timeout: float = 600.0) -> list[Failure]:
        """Take the `count` least loaded workers out: no new groups, then, when their rollouts were taken, the end.

        After `timeout` seconds they end anyway; what was given up with them is returned.
        """
        if not 0 < count < len(self._members):
            raise GeneratorError(f"remove: {count} of {len(self._members)} workers: at least one must stay")
        leaving = sorted(self._members, key=lambda name: sum(self._members[name].load.values()))[:count]
        for name in leaving:
            self._members[name].draining = True
        return [failure for name in leaving for failure in await self._drain(name, timeout)]

    async def replace(self, worker: str) -> str:
        """Start a worker in place of one that `check` or `fail` reported; returns its name. It holds no weights yet."""
        if worker in self._members:
            self._discard(worker, "replaced")
        (name,) = await self.add(1)
        self._replaced += 1
        return name

    async def close(self) -> None:
        """End all workers."""
        members, self._members = self._members, {}
        calls = [quietly(member.handle.shutdown.remote(), CLOSE_SECONDS) for member in members.values()]
        await asyncio.gather(*calls)
        for member in members.values():
            kill(member.handle)

    async def adopt(self, version: int) -> None:
        """The weights that the workers loaded from `model.path` are `version`; for runs without a learner."""
        await self._ask_all(
            {name: member.handle.name_version.remote(version) for name, member in self._members.items()}
        )

    # Groups.

    async def submit(self, groups: Sequence[tuple[GroupId, Prompt]]) -> None:
        """Send groups to the least loaded workers. Raises what an engine has against a request.

        Groups sent to a worker that turns out to be dead are reported by `check`, as if it had died a moment later.
        """
        config, size = self.config.generator, self.config.generator.rollouts_per_prompt
        sampling = SamplingParams(
            temperature=config.temperature, max_tokens=config.max_tokens, seed=self.config.run.seed, logprobs=True
        )
        loads = {name: sum(m.load.values()) for name, m in self._members.items() if not (m.draining or m.failure)}
        if not loads:
            raise GeneratorError("no generator worker is left to submit to")
        tokens = [size * (len(prompt.token_ids) + sampling.max_tokens) for _, prompt in groups]
        parts: dict[str, list[GroupRequest]] = {}
        for (group, prompt), share in zip(groups, assign(tokens, size, loads, spread=self._spread), strict=True):
            for name, indices in share.items():
                parts.setdefault(name, []).append(GroupRequest(group, prompt, indices, size, sampling))
                self._members[name].groups.add(group)
                self._members[name].load[group] = len(indices) * (len(prompt.token_ids) + sampling.max_tokens)
        await self._ask_all({name: self._members[name].handle.submit.remote(part) for name, part in parts.items()})

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
        await self._tell({name: self._members[name].handle.keep.remote(part) for name, part in wanted.items()})

    async def drop(self, groups: Sequence[GroupId]) -> None:
        """Workers forget these groups and abort what is unfinished of them."""
        unwanted: dict[str, list[GroupId]] = {}
        for group in groups:
            for name in self._holders(group):
                self._members[name].load.pop(group, None)
                self._members[name].groups.discard(group)
                unwanted.setdefault(name, []).append(group)
        await self._tell({name: self._members[name].handle.drop.remote(part) for name, part in unwanted.items()})

    async def sample(self, group: GroupId) -> list[Rollout]:
        """Copies of the group's finished rollouts, by index; empty where their worker is gone."""
        calls = [self._members[name].handle.sample.remote(group) for name in self._holders(group)]
        parts = await asyncio.gather(*(quietly(call, ANSWER_SECONDS) for call in calls))
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
                raise GeneratorError("no generator worker is left to evaluate on")
            parts = {name: missing[start :: len(names)] for start, name in enumerate(names)}
            calls = {
                name: self._members[name].handle.evaluate.remote([prompts[i] for i in part], sampling, samples)
                for name, part in parts.items()
                if part
            }
            answers = await self._ask_all(calls)
            for name, answer in answers.items():
                rows.update(zip(parts[name], answer, strict=True))
            missing = [index for index in missing if index not in rows]
        return [rows[index] for index in range(len(prompts))]

    # Health.

    async def check(self) -> list[Failure]:
        """Workers that died, failed or hang: ended, taken out of the pool, and reported once."""
        stats = await self._all_stats()
        failures = []
        for name, member in list(self._members.items()):
            if (complaint := member.failure or self._complaint(member, stats.get(name))) is not None:
                failures.append(self._discard(name, complaint))
        return failures

    async def fail(self, worker: str, reason: str) -> list[Failure]:
        """End a worker that someone else has a complaint about (no weights taken, say) and take it out."""
        return [self._discard(worker, reason)] if worker in self._members else []

    async def stats(self) -> PoolStats:
        """Every worker that answers; counts are those since the last call."""
        workers = await self._all_stats()
        now = counters(workers)
        since: Counter[str] = Counter({"generator/replaced": self._replaced, "generator/preemptions": 0})
        for name, counts in now.items():
            since.update(counts - self._read.get(name, Counter()))
        self._replaced = 0
        self._read = now
        return PoolStats(workers, since)

    # Within.

    def _names(self, count: int) -> list[str]:
        start, self._next = self._next, self._next + count
        return [actor_name(self.config.run.name, "generator", index) for index in range(start, self._next)]

    async def _drain(self, name: str, timeout: float) -> list[Failure]:
        member = self._members[name]
        left = await quietly(member.handle.drain.remote(timeout), timeout + ANSWER_SECONDS)
        if name not in self._members:
            return []  # it failed meanwhile, and was reported
        if left is not None:
            member.groups = {GroupId(*group) for group in left}
            await quietly(member.handle.shutdown.remote(), CLOSE_SECONDS)
        failure = self._discard(name, "removed from the pool before its rollouts were taken")
        return [failure] if failure.groups else []

    def _discard(self, name: str, reason: str) -> Failure:
        member = self._members.pop(name)
        kill(member.handle)
        return Failure(name, reason, sorted(member.groups))

    def _holders(self, group: GroupId) -> list[str]:
        return [name for name, member in self._members.items() if group in member.groups]

    def _complaint(self, member: _Member, stats: WorkerStats | None) -> str | None:
        if stats is None:
            member.unanswered += 1
            return f"did not answer for {2 * ANSWER_SECONDS:g} s" if member.unanswered >= 2 else None
        member.unanswered = 0
        if stats.error is not None:
            return stats.error
        limit = self.config.generator.request_timeout
        if stats.stalled_seconds > limit:
            return (
                f"hangs: {stats.engine.running + stats.engine.waiting} rollout(s) in flight and none finished for "
                f"{stats.stalled_seconds:.0f} s (generator.request_timeout: {limit:g})"
            )
        return None

    async def _all_stats(self) -> dict[str, WorkerStats]:
        names = list(self._members)

        async def ask(name: str) -> WorkerStats | None:
            member = self._members[name]
            try:
                return await asyncio.wait_for(result(member.handle.stats.remote()), ANSWER_SECONDS)
            except RayActorError as error:
                member.failure = f"died: {cause(error)}"
            except TimeoutError:
                pass
            return None

        answers = await asyncio.gather(*(ask(name) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def _ask_all(self, calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        """Answers by worker; a dead worker is marked and has none. What a method raises is raised, the cause itself."""
        answers = await asyncio.gather(*(result(call) for call in calls.values()), return_exceptions=True)
        answered: dict[str, Any] = {}
        for name, answer in zip(calls, answers, strict=True):
            if isinstance(answer, RayActorError):
                if name in self._members:
                    self._members[name].failure = f"died: {cause(answer)}"
            elif isinstance(answer, RayTaskError) and isinstance(answer.cause, Exception):
                raise answer.cause
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered[name] = answer
        return answered

    async def _tell(self, calls: Mapping[str, Awaitable[Any]]) -> None:
        await asyncio.gather(*(quietly(call, ANSWER_SECONDS) for call in calls.values()))
