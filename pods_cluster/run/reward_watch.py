"""A watch on the rewards of a run: it tells of those that fail or are waited for, and knows when waiting is in vain
(pure)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pods_cluster.config import Config
from pods_cluster.run.errors import RewardsFail
from pods_cluster.run.stages import Generators
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scoring_totals import RewardFailures, ScoringTotals
from pods_cluster.telemetry.number_format import duration
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.wording import counted

GROWTH = 10
"""A failure is told again when it has happened so many times as often as when it was told last."""
SLOW_SECONDS = 10.0
"""A step that waits so long for rewards alone is told; later waits are when they are three times as long as the last."""
SLOW_GROWTH = 3
POLL_SECONDS = 5.0
"""Time between two looks during an evaluation."""
LOOK_SECONDS = 10.0
"""Longest time between two looks that counts as waited; beyond it the run did something else."""
FIRST_FAILURES = 256
"""Least rollouts, and no fewer than a step has, that have to fail before a run without any reward so far is ended: a
reward may have no number for most of them."""
HOPELESS_FAILURES = 2
"""Least rollouts without a reward, one after another, for an end after `scoring.patience`."""


T = TypeVar("T")


class RewardWatch:
    """Warns of rewards that fail and of steps that wait for rewards alone; keeps what a final error says of them."""

    def __init__(self, recorder: Recorder, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._config = config
        self._clock = clock
        self._told: dict[tuple[str, FailureKind], int] = {}
        self._failures: list[RewardFailures] = []
        self._slow_told = SLOW_SECONDS / SLOW_GROWTH
        self._looked_at: float | None = None
        self._valid = self._missing = self._pending = 0
        self._missing_at_valid = 0  # rollouts without a reward when the last one got one
        self._in_vain = 0.0  # seconds waited since then
        self._at_first_step: int | None = None  # rollouts without a reward before the first step: of an evaluation
        self._waited = 0.0  # seconds that this step has waited for rewards alone
        self._at_step = (0, 0, {})  # valid, missing, failures by reward and kind when the step began

    def begin_step(self) -> None:
        """A step begins: what is waited for counts from here."""
        if self._at_first_step is None:
            self._at_first_step = self._missing
        self._waited = 0.0
        self._at_step = self._valid, self._missing, {(f.reward, f.kind): f.count for f in self._failures}

    def look(self, totals: ScoringTotals) -> None:
        """Take the counts of now, and tell of what is news: each reward and kind at 1, 10, 100, … failures.

        Raises RewardsFail when no step will come of these rewards.
        """
        self._failures = totals.failures()
        self._count(totals)
        self._tell(GROWTH)
        if self._waited >= self._slow_told * SLOW_GROWTH:
            self._slow_told = self._waited
            self._recorder.event("rewards_slow", self._progress(), level="warning", seconds=self._waited)
        if (reason := self.hopeless()) is not None:
            raise RewardsFail(reason)

    def tell_all(self) -> None:
        """Tell of failures since they were told last, for the count of the whole run: also of what no step recorded."""
        self._tell(1)

    def _tell(self, growth: int) -> None:
        for failure in self._failures:
            key = (failure.reward, failure.kind)
            told = self._told.get(key, 0)
            if failure.count > told and failure.count >= told * growth:
                self._told[key] = failure.count
                self._recorder.event(
                    "reward_failed",
                    f"{failure}; these rollouts are left out{self._consequence(failure)}",
                    level="warning",
                    reward=failure.reward,
                    failure=failure.kind.value,
                    count=failure.count,
                    share=failure.share,
                    message=failure.message,
                )

    async def during(self, work: Coroutine[Any, Any, T], pool: Generators) -> T:
        """Wait for `work` (an evaluation), looking at the rewards of the pool meanwhile. Raises what either raises."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=POLL_SECONDS))[0]:
                await pool.observe()
                self.look(pool.scoring)
            return task.result()
        finally:
            task.cancel()

    @property
    def worst(self) -> RewardFailures | None:
        """The most frequent failure so far."""
        return max(self._failures, key=lambda failure: failure.count, default=None)

    def describe(self) -> str:
        """The failures so far in one sentence for a final error; empty where there are none."""
        if (worst := self.worst) is None:
            return ""
        more = f" (and {counted(len(self._failures) - 1, 'other failure')})" if len(self._failures) > 1 else ""
        return f"{worst}{more}"

    def hopeless(self) -> str | None:
        """Say why no step will come of these rewards, if that is so; None while there is hope.

        It is so when as many rollouts as a step has, and FIRST_FAILURES, were scored since the first step began and none
        of this run ever got a valid reward, or when none got one in `scoring.patience` seconds of waiting while rewards failed.
        """
        since = self._missing - self._missing_at_valid
        first, patience = max(FIRST_FAILURES, self._config.rollouts_per_step), self._config.scoring.patience
        if not self._valid and self._at_first_step is not None and self._missing - self._at_first_step >= first:
            reason = f"none of the first {self._missing:,} rollouts got a reward"
        elif since >= HOPELESS_FAILURES and self._in_vain >= patience:
            reason = f"no rollout got a reward in {duration(self._in_vain)} (scoring.patience: {patience:g})"
        else:
            return None
        return f"rewards: {reason}; {self.describe()}"

    def _count(self, totals: ScoringTotals) -> None:
        now = self._clock()
        seconds = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if totals.valid > self._valid:
            self._missing_at_valid, self._in_vain = totals.missing, 0.0
        elif seconds <= LOOK_SECONDS and self._pending:
            self._in_vain += seconds
        if not totals.pending or totals.generating:
            self._waited = 0.0
        elif seconds <= LOOK_SECONDS and self._pending:
            self._waited += seconds
        self._valid, self._missing, self._pending = totals.valid, totals.missing, totals.pending

    def _consequence(self, failure: RewardFailures) -> str:
        """The effect of timeouts on a step, in a few words."""
        index, reward = next(
            ((i, reward) for i, reward in enumerate(self._config.reward) if reward.key == failure.reward), (0, None)
        )
        if failure.kind is not FailureKind.TIMEOUT or reward is None:
            return ""
        scorers = self._config.generator.workers * self._config.scoring.workers
        longest = self._config.rollouts_per_step * reward.timeout / scorers
        return (
            f". Each takes a scorer for reward.{index}.timeout: {reward.timeout:g} s: a step in which all do lasts "
            f"{duration(longest)} with {counted(scorers, 'scorer')}"
        )

    def _progress(self) -> str:
        valid, missing, before = self._at_step
        scored = self._valid - valid
        counts = [
            f"{failure.reward} {'timed out' if failure.kind is FailureKind.TIMEOUT else f'failed ({failure.kind.value})'} "
            f"{counted(count, 'time')}"
            for failure in self._failures
            if (count := failure.count - before.get((failure.reward, failure.kind), 0)) > 0
        ]
        of = scored + self._missing - missing + self._pending
        return ", ".join(
            [f"the step waits for rewards since {duration(self._waited)}: {scored:,} of {of:,} scored", *counts]
        )
