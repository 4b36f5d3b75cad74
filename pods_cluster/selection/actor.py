"""The selector as a Ray actor: workers report the numbers of finished rollouts, the controller polls for steps."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pods_cluster.actor_names import NAMESPACE, actor_name
from pods_cluster.config import Config
from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.policy import selection_policy
from pods_cluster.selection.selector_core import Decision, GroupFate, SelectorCore
from pods_cluster.selection.stopping import Instructions
from pods_cluster.stopped_process import Process
from pods_cluster.telemetry.process_memory import process_memory
from pods_cluster.types import GroupId

COLLECT_AFTER = 20_000
"""Objects made before Python looks for cycles among the youngest; its own number is 700."""


class SelectorError(RuntimeError):
    """A report of a worker that contradicts itself. Nobody waits for a report, so the next `collect` raises its cause."""


class Notifier:
    """Wakes coroutines of one event loop that wait for a change, each with a deadline of its own.

    It keeps no state: a coroutine that looks at what it waits for and then calls `wait` without another `await` in
    between misses no notification. A wait costs one future and one timer; `asyncio.wait_for` on an event would start
    a task.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival, which is the order of waking

    def notify_all(self) -> None:
        """Wake everyone who waits now."""
        for future in self._waiting:
            _set_done(future)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `notify_all`, or after `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout_s, _set_done, future)
        self._waiting[future] = None
        try:
            await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SelectorActor:
    """The selector of a run. All methods run on one event loop; none holds it longer than selecting what is new.

    Raises ConfigError for a rule that cannot be used (see `selection_policy`).
    """

    def __init__(self, config: Config, *, own_process: bool = False) -> None:
        """`own_process`: nothing else runs in this process, whose settings may change."""
        if own_process:
            _rest_the_collector()
        self._core = SelectorCore(selection_policy(config))
        self._staleness = config.staleness
        self._changed = Notifier()
        self._instructed = Notifier()
        self._errors: list[Exception] = []
        self._poll = 0
        self._full_since: float | None = None
        self._version = -1
        self._rollouts = 0
        self._selecting_seconds = 0.0

    async def process(self) -> Process:
        """This process."""
        import ray

        return Process(os.getpid(), ray.get_runtime_context().get_node_id())

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> list[int]:
        """Announce groups (id, size) in the order of issue, before the first request for one of them is sent.

        Returns how many rollouts of each to issue now; `instructions` asks for the rest. Raises ValueError for a group
        that is expected already or has had its fate.
        """
        return [self._core.expect(group, size) for group, size in groups]

    async def instructions(self, timeout_s: float) -> Instructions:
        """Wait until there is something for the generators to do, or `timeout_s` seconds have passed."""
        if not self._core.has_instructions:
            await self._instructed.wait(timeout_s)
        return self._core.instructions()

    async def report(self, shards: Sequence[GroupShard]) -> None:
        """Add the shards of one message, of several groups. A bad shard fails this call and the next `collect`."""
        failure: Exception | None = None
        for shard in shards:
            try:
                self._core.add(shard)
                self._rollouts += len(shard.indices)
            except Exception as error:
                failure = error
                self._errors.append(error)
        self._notify()
        if failure is not None:
            raise failure

    async def collect(
        self,
        want: int,
        learner_version: int,
        timeout_s: float,
        *,
        straggler_s: float = 0.0,
        partial: bool = True,
    ) -> Decision:
        """Wait for a step: until `want` groups are trainable, another group's fate is known, or `timeout_s` has passed.

        Whatever ends the wait, the decision holds the trainable groups, up to `want` (`partial=False`: all `want` or
        none). With `straggler_s` these are only groups among the `want` oldest, until a step could have been filled
        for that many seconds: then newer groups overtake those that are missing. A later poll supersedes an earlier
        one, which returns empty, so that a restarted controller loses nothing to the one before it.

        Raises SelectorError for a report that contradicts itself, RuleError when the rule fails, ValueError for a
        `want` below 1.
        """
        if want < 1:
            raise ValueError(f"want: {want} groups; ask for at least 1")
        self._poll += 1
        poll = self._poll
        self._changed.notify_all()  # wakes an earlier poll
        if learner_version != self._version:
            self._version, self._full_since = learner_version, None
        started, seconds_before = time.monotonic(), self._selecting_seconds
        while True:
            if poll != self._poll:
                return Decision(superseded=True)
            if self._errors:
                error = self._errors.pop(0)
                raise SelectorError(f"a report to the selector failed: {type(error).__name__}: {error}") from error
            now = time.monotonic()
            before = time.perf_counter()
            try:
                trainable, fates = self._core.ready(learner_version, self._staleness)
                patience = self._patience(now, trainable >= want, straggler_s)
                complete = trainable >= want and (patience <= 0 or self._core.oldest_ready(want) >= want)
                timed_out = now - started >= timeout_s
                if complete or fates or timed_out:
                    decision = self._core.collect(
                        want, learner_version, self._staleness, partial=partial, oldest_only=patience > 0
                    )
                    decision.waited = now - started
                    decision.select_seconds = self._selecting_seconds - seconds_before + time.perf_counter() - before
                    decision.resident_bytes = process_memory().resident
                    decision.timed_out = timed_out and len(decision.selections) < want and not decision.fates
                    if len(decision.selections) == want:
                        self._full_since = None
                    return decision
            finally:
                self._selecting_seconds += time.perf_counter() - before
            remaining = timeout_s - (now - started)
            await self._changed.wait(min(remaining, patience) if patience > 0 else remaining)

    def _patience(self, now: float, full: bool, straggler_s: float) -> float:
        """Return how many more seconds the oldest groups are waited for, since a step could first be filled."""
        if not full:
            self._full_since = None
            return straggler_s
        if self._full_since is None:
            self._full_since = now
        return straggler_s - (now - self._full_since)

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._core.has_instructions:
            self._instructed.notify_all()

    async def mark_lost(self, worker: str) -> int:
        """Mark the finished rollouts that a dead worker held as lost, and return how many they are."""
        lost = self._core.mark_lost(worker)
        self._notify()
        return lost

    async def cancel(self, groups: Iterable[GroupId]) -> list[GroupFate]:
        """Give up groups and return those that had no fate yet. `collect` does not report their fate again."""
        cancelled = self._core.cancel([GroupId(*group) for group in groups])
        self._changed.notify_all()
        return cancelled

    async def stats(self) -> dict[str, Any]:
        """Return counts since the start: groups by fate, rollouts added and ignored, seconds of selection and CPU time."""
        return {
            "expected": len(self._core.expected()),
            "rollouts": self._rollouts,
            "fates": {fate.value: count for fate, count in self._core.fate_counts.items()},
            "ignored": dict(self._core.ignored),
            "selecting_seconds": self._selecting_seconds,
            "cpu_seconds": time.process_time(),
        }


def _rest_the_collector() -> None:
    """Have Python look for cycles seldom: a group makes hundreds of objects and none of them is in a cycle, while a look
    goes through all modules that the process has imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


def start_selector(run: str, config: Config, index: int = 0) -> Any:
    """Start a selector of a run as the Ray actor `<run>/selector/<index>` and return its handle.

    It asks for no CPU, and runs on the caller's node: the controller's, which is not one that comes and goes. A soft affinity
    would not do: Ray then places an actor without resources on any node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(SelectorActor)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    placed = actor.options(
        name=actor_name(run, "selector", index), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=here
    )
    return placed.remote(config, own_process=True)
