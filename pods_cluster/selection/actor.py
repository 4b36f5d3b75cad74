"""The selector as a Ray actor: workers report numbers of finished rollouts, the controller polls for selections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pods_cluster.names import NAMESPACE, actor_name
from pods_cluster.selection.assembly import Decision, GroupFate, SelectorCore
from pods_cluster.selection.group import SelectorSettings
from pods_cluster.selection.registry import resolve
from pods_cluster.selection.select import SignalScope
from pods_cluster.types import GroupId, GroupShard


class SelectorError(RuntimeError):
    """A report could not be taken in. Reports are fire and forget, so the next `collect` raises it, with the cause."""


class SelectorActor:
    """One selector of a run. All methods run on one event loop; none holds it longer than selecting what is new.

    `m` of `n` rollouts are kept by `rule` with `rule_options`. Raises ValueError naming the field of the
    configuration for values that cannot work.
    """

    def __init__(
        self,
        rule: str,
        m: int,
        n: int,
        seed: int,
        min_valid: int | None = None,
        no_signal: Literal["replace", "drop", "keep"] = "replace",
        scope: SignalScope = "kept",
        staleness: int = 0,
        rule_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not 1 <= m <= n:
            raise ValueError(f"selector.keep: {m} must be at least 1 and at most generator.rollouts_per_prompt: {n}")
        if min_valid is not None and not 1 <= min_valid <= n:
            raise ValueError(f"selector.min_valid: {min_valid} must be at least 1 and at most n: {n}; or leave it out")
        if no_signal not in ("replace", "drop", "keep"):
            raise ValueError(f"selector.no_signal: {no_signal!r} is none of replace, drop, keep")
        if scope not in ("kept", "group"):
            raise ValueError(f"learner.advantage.scope: {scope!r} is none of kept, group")
        if staleness < 0:
            raise ValueError(f"staleness: {staleness} must be 0 or more")
        settings = SelectorSettings(resolve(rule, rule_options), m, seed, min_valid, no_signal, scope)
        self._core = SelectorCore(settings)
        self._staleness = staleness
        self._changed = asyncio.Event()
        self._errors: list[Exception] = []
        self._poll = 0
        self._rollouts = 0
        self._selecting_seconds = 0.0

    async def expect(self, groups: Sequence[tuple[GroupId, int]]) -> None:
        """Announce groups (id, size) in the order of issue. Await it before the first request of them goes out."""
        for group, size in groups:
            self._core.expect(group, size)

    async def report(self, shards: Sequence[GroupShard]) -> None:
        """Take in finished rollouts, of several groups a message. A bad shard fails the next `collect`."""
        failure: Exception | None = None
        for shard in shards:
            try:
                self._core.add(shard)
                self._rollouts += len(shard.indices)
            except Exception as error:
                failure = error
                self._errors.append(error)
        self._changed.set()
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
        """Wait for a step: until `want` groups are trainable, or any other fate is known, or `timeout_s` has passed.

        Whatever ends the wait, the trainable groups at hand are handed over, up to `want` (`partial=False`: only all
        together). In the first `straggler_s` seconds only the `want` oldest groups count and are handed over. A later
        poll supersedes an earlier one, which returns empty: a controller that was restarted loses nothing to its
        forerunner.

        Raises `SelectorError` for a report that could not be taken in, `RuleError` when the rule fails.
        """
        if want < 1:
            raise ValueError(f"want: {want} groups; ask for at least 1")
        self._poll += 1
        poll = self._poll
        self._changed.set()  # wakes an earlier poll
        started = time.monotonic()
        while True:
            if poll != self._poll:
                return Decision(superseded=True)
            self._changed.clear()
            if self._errors:
                error = self._errors.pop(0)
                raise SelectorError(f"a report to the selector failed: {type(error).__name__}: {error}") from error
            elapsed = time.monotonic() - started
            oldest_only = elapsed < straggler_s
            before = time.perf_counter()
            try:
                trainable, fates = self._core.ready(learner_version, self._staleness)
                if trainable >= want and oldest_only:
                    trainable = self._core.oldest_ready(want)
                timed_out = elapsed >= timeout_s
                if trainable >= want or fates or timed_out:
                    decision = self._core.collect(
                        want, learner_version, self._staleness, partial=partial, oldest_only=oldest_only
                    )
                    decision.timed_out = timed_out and len(decision.selections) < want and not decision.fates
                    return decision
            finally:
                self._selecting_seconds += time.perf_counter() - before
            remaining = timeout_s - elapsed
            if oldest_only:
                remaining = min(remaining, straggler_s - elapsed)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, remaining))

    async def mark_lost(self, worker: str) -> int:
        """Count the finished rollouts that lie on a dead worker as lost, and return how many those are."""
        lost = self._core.mark_lost(worker)
        self._changed.set()
        return lost

    async def cancel(self, groups: Iterable[GroupId]) -> list[GroupFate]:
        """Give up groups; returns those that had no fate yet. Their fate is not reported again by `collect`."""
        cancelled = self._core.cancel([GroupId(*group) for group in groups])
        self._changed.set()
        return cancelled

    async def stats(self) -> dict[str, Any]:
        """Counts since the start: groups by fate, rollouts taken in and ignored, seconds of selection and CPU."""
        return {
            "expected": len(self._core.expected()),
            "rollouts": self._rollouts,
            "fates": {fate.value: count for fate, count in self._core.fate_counts.items()},
            "ignored": dict(self._core.ignored),
            "selecting_seconds": self._selecting_seconds,
            "cpu_seconds": time.process_time(),
        }


def start_selector(run: str, *, num_cpus: float = 0.0, **settings: Any) -> Any:
    """Start `<run>/selector/0` in the namespace `pods`; `settings` are those of `SelectorActor`. Returns its handle."""
    import ray

    actor = ray.remote(SelectorActor)
    return actor.options(name=actor_name(run, "selector"), namespace=NAMESPACE, num_cpus=num_cpus).remote(**settings)
