"""Calls to the workers of a pool: all at once, with a sign of life asked for while they last, and what each failure means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from pods_cluster.generation.engine_thread import EngineHangs
from pods_cluster.generation.members import Member, PoolMembers
from pods_cluster.generation.messages import WorkerFailed, WorkerStats
from pods_cluster.generation.placement import ANSWER_SECONDS, as_coroutine, cause
from pods_cluster.stopped_process import SILENT_SECONDS, Process, Unanswered, answer_of
from pods_cluster.wording import counted

SIGN_SECONDS = 2.0
"""Longest wait for an answer before a sign of life is asked for."""


class PoolCalls(PoolMembers):
    """Members that can be asked. A worker that is gone, failed or hangs is marked: its `failure` says why."""

    def sound(self) -> dict[str, Member]:
        """Members without a complaint."""
        return {name: member for name, member in self._members.items() if not member.failure}

    def complaint(self, member: Member, stats: WorkerStats | None) -> str | None:
        """Why this worker is to be replaced, by what it says of itself (None: no answer in time)."""
        if stats is None:
            member.unanswered += 1
            return f"did not answer for {2 * ANSWER_SECONDS:g} s" if member.unanswered >= 2 else None
        member.unanswered = 0
        if stats.error is not None:
            return stats.error
        limit = self.config.generator.request_timeout
        if stats.stalled_seconds > limit:
            return (
                f"hangs: {counted(stats.engine.running + stats.engine.waiting, 'rollout')} in flight and none finished for "
                f"{stats.stalled_seconds:.0f} s (generator.request_timeout: {limit:g})"
            )
        return None

    async def all_stats(self) -> dict[str, WorkerStats]:
        """Stats of every worker without a complaint that answers in time; renews `scoring`, and fetches what rewards printed."""
        names = list(self.sound())

        async def ask(name: str) -> WorkerStats | None:
            member = self._members[name]
            patience = max(ANSWER_SECONDS, SILENT_SECONDS + 0.1)
            try:
                return await answer_of(as_coroutine(member.handle.stats.remote()), member.process, patience)
            except RayActorError as error:
                member.failure = f"died: {cause(error)}"
            except Unanswered as error:
                member.failure = str(error) if error.seen else member.failure
            return None

        answers = await asyncio.gather(*(ask(name) for name in names))
        stats = {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}
        for name, answer in stats.items():
            if name in self._members:
                self._members[name].rate = answer.saturated
                self._members[name].generated = answer.engine.generated_tokens
        self.scoring.update({name: answer.scorers for name, answer in stats.items()})
        self.scoring.generating = sum(answer.engine.running + answer.engine.waiting for answer in stats.values())
        told = {name: answer.scorers.printed for name, answer in stats.items() if answer.scorers is not None}
        news = [(name, member) for name, member in self._members.items() if told.get(name, 0) > member.printed]
        await asyncio.gather(*(self._fetch_printed(name, member) for name, member in news))
        return stats

    async def ask_all(self, calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        """Answers by worker. What a method raises is raised, the cause itself.

        A worker that dies, or whose engine hangs, is marked and has no answer; so has one that stops to answer `stats`
        meanwhile: a call may take long, but none is waited for without a sign of life.
        """
        tasks = {asyncio.ensure_future(as_coroutine(call)): name for name, call in calls.items()}
        finished: set[asyncio.Task[Any]] = set()
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=min(SIGN_SECONDS, ANSWER_SECONDS))
                finished |= done
                if not done:
                    lost = await self._lost({tasks[task] for task in pending})
                    pending = {task for task in pending if tasks[task] not in lost}
        finally:
            for task in tasks:
                task.cancel()
        answered: dict[str, Any] = {}
        for task, name in tasks.items():
            if task not in finished:
                continue
            error = task.exception()
            if error is None:
                answered[name] = task.result()
            elif not self._mark_failed(name, error):
                raise error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
        return answered

    async def _lost(self, names: set[str]) -> set[str]:
        """The workers among these that are gone, failed or hang; they are marked."""
        stats = await self.all_stats()
        for name, member in self._members.items():
            if name in names and member.failure is None:
                member.failure = self.complaint(member, stats.get(name))
        return {name for name in names if name not in self._members or self._members[name].failure is not None}

    def _mark_failed(self, name: str, error: BaseException) -> bool:
        """Whether a call's error means that its worker is to be replaced; it is marked then."""
        if isinstance(error, RayActorError):
            reason = f"died: {cause(error)}"
        elif isinstance(error, RayTaskError) and isinstance(error.cause, EngineHangs):
            reason = f"hangs: {error.cause}"
        elif isinstance(error, RayTaskError) and isinstance(error.cause, WorkerFailed):
            reason = str(error.cause)
        else:
            return False
        if name in self._members:
            self._members[name].failure = reason
        return True

    async def tell(self, calls: Mapping[str, Awaitable[Any]]) -> None:
        """Make calls whose errors `check` will find."""
        sound = self.sound()
        await asyncio.gather(*(self.answer(sound[name], call) for name, call in calls.items() if name in sound))

    async def answer(self, member: Member, call: Awaitable[Any]) -> Any:
        """The answer of a worker, or None; one that is seen to be stopped or lost with its node is marked."""
        try:
            return await answer_of(as_coroutine(call), member.process, ANSWER_SECONDS)
        except Unanswered as error:
            member.failure = str(error) if error.seen else member.failure
        except (RayActorError, RayTaskError):
            pass
        return None


async def error_of(call: Awaitable[Any], seconds: float, process: Process) -> str | None:
    """Why a call to a worker has no answer within `seconds`; None: it has."""
    try:
        await answer_of(as_coroutine(call), process, seconds)
    except Unanswered as error:
        return str(error)
    except RayActorError as error:
        return f"died: {cause(error)}"
    except RayTaskError as error:
        return cause(error)
    return None
