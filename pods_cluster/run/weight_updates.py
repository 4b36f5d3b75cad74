"""Weight updates: the learner trains a step, and every generator gets the new weights or is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from pods_cluster.generation.messages import Failure
from pods_cluster.learning.reports import StepResult
from pods_cluster.run.errors import RunError, TrainingFails
from pods_cluster.run.stages import Generators, Learners, Publisher
from pods_cluster.run.step_assembly import Assembler
from pods_cluster.run.step_numbers import StageClock, Tally
from pods_cluster.sizing.pools import Notice
from pods_cluster.types import Fate, Selection
from pods_cluster.wording import counted

CAUSES_SHOWN = 3
"""Causes of lost rollouts that one event names; the others are counted."""
CAUSE_LENGTH = 200
"""Characters of a cause in an event."""


class WeightUpdates:
    """Updates the learner's weights, and keeps all generators on them.

    After `max_skipped` updates in a row that were skipped the run ends; `newest` gives the checkpoint that its error names.
    `version` is the learner's weight version: the number of updates applied. `trained_tokens` are all that it has
    trained on, of prompts and of completions. `left_in_flight` groups were left when the last step had been trained.
    """

    def __init__(
        self,
        pool: Generators,
        learners: Learners,
        publisher: Publisher,
        assembler: Assembler,
        notice: Notice,
        *,
        max_skipped: int,
        newest: Callable[[], Path | None],
    ) -> None:
        self.version = 0
        self.left_in_flight = 0
        self.trained_tokens = 0
        self._pool, self._learners, self._publisher = pool, learners, publisher
        self._assembler, self._notice = assembler, notice
        self._max_skipped, self._newest = max_skipped, newest
        self._skipped_in_a_row = 0

    async def train(
        self, selections: list[Selection], step: int, clock: StageClock, tally: Tally
    ) -> tuple[StepResult, dict[str, float]]:
        """Train the step and publish the new weights; returns what the learner did, and the metrics of both.

        Groups that the learner could not get come again; the weights are published if an update was applied. Raises
        LearnerError, LearnerFailed, RunError and TrainingFails.
        """
        result = await self._learners.train(selections, step)
        self._assembler.continuous.hold()  # the generators serve what is now the version before the newest
        self._assembler.end_trained(result.trained)
        tally.fates[Fate.TRAINED] += len(result.trained)
        if result.lost:
            tally.fates[Fate.LOST] += len(result.lost)
            await self._assembler.return_lost([lost.group for lost in result.lost])
            self._notice("groups_lost", lost_groups_text(result))
        if text := partial_groups_text(result):
            self._notice("rollouts_lost", text)
        self.left_in_flight = len(self._assembler.ledger.in_flight)
        dropping = asyncio.ensure_future(self._pool.drop([selection.group for selection in selections]))
        metrics = {name: float(value) for name, value in result.metrics.items()}
        metrics |= {
            "updates": float(result.updates),
            "updates_skipped": float(sum(not skip.overflow for skip in result.skipped)),
            "rollouts/trained": float(result.trained_rollouts),
            "tokens/trained": float(result.trained_tokens),
            "learner/received_bytes": float(result.received_bytes),
            "learner/busy_seconds": result.busy_seconds,
            "timing_s/fetch": result.fetch_seconds,
            "timing_s/update": result.update_seconds,
        }
        if overflows := sum(skip.overflow for skip in result.skipped):
            metrics["updates_overflowed"] = float(overflows)
        metrics |= result.memory.metrics("learner")
        self.trained_tokens += result.total_tokens
        self._look_at_skipped(result)
        if result.updates:
            self.version += 1
            with clock("publish"):
                metrics |= await self.publish()
        await dropping
        return result, metrics

    def _look_at_skipped(self, result: StepResult) -> None:
        """Tell of updates that were skipped. Raises TrainingFails after too many in a row."""
        skipped = {skip.update: skip for skip in result.skipped}
        for update in range(result.updates + len(skipped)):
            if update not in skipped:
                self._skipped_in_a_row = 0
            elif not skipped[update].overflow:
                self._skipped_in_a_row += 1
        if not skipped:
            return
        causes = "; ".join(dict.fromkeys(skip.cause for skip in result.skipped))
        quiet = all(skip.overflow for skip in result.skipped)
        self._notice(
            "update_skipped",
            f"{len(skipped)} of {counted(result.updates + len(skipped), 'update')} of the step skipped: {causes}; weights and "
            f"optimiser stay as they were before",
            level="info" if quiet else "warning",
        )
        if self._skipped_in_a_row >= self._max_skipped:
            newest = self._newest()
            last = f"the last checkpoint is {newest}" if newest is not None else "no checkpoint was saved yet"
            raise TrainingFails(
                f"{self._skipped_in_a_row} updates in a row were skipped ({causes}): training cannot go on from weight "
                f"version {self.version}; {last}. Lower learner.learning_rate, look at the rewards' sizes, or use "
                f"model.dtype: bfloat16 or float32, then go on by --resume (learner.max_skipped: {self._max_skipped})"
            )

    async def publish(self) -> dict[str, float]:
        """Send the weights to every generator, and replace those that cannot take them; returns the metrics.

        Raises LearnerFailed where the learner cannot send, and RunError where a replacement takes no weights.
        """
        workers = dict(self._pool.workers)
        report = await self._publisher.publish(self.version, workers)
        for worker, reason in report.failed.items():
            self._notice("worker_failed", f"{worker} did not take version {self.version}: {reason}")
            for failure in await self._pool.fail(worker, reason):
                await self._assembler.lose_worker(failure)
        if report.resent:
            causes = "; ".join(f"{worker}: {_short(reason)}" for worker, reason in report.resent.items())
            self._notice(
                "weights_resent",
                f"version {self.version} was sent {report.attempts} times, and all that are left hold it: {causes}",
                level="warning",
            )
        return {
            "weights/bytes": float(report.nbytes),
            "weights/sync_seconds": report.seconds,
            "weights/receivers": float(len(workers) - len(report.failed)),
            "weights/failed": float(len(report.failed)),
            "weights/rebuilds": float(report.rebuilt),
        }

    async def replace(self, failure: Failure) -> None:
        """Start a worker in place of one that is gone, and give it the weights. Raises GeneratorError and RunError."""
        name = await self._pool.replace(failure.worker)
        report = await self._publisher.catch_up(self.version, name, self._pool.workers[name])
        if report.failed:
            raise RunError(f"{name}, started in place of {failure.worker}, took no weights: {report.failed[name]}")
        self._notice("worker_replaced", f"{name} serves version {self.version} in place of {failure.worker}")


def lost_groups_text(result: StepResult) -> str:
    """A sentence about the groups that were not trained because rollouts did not reach the learner, with the causes."""
    missing, kept = sum(lost.missing for lost in result.lost), sum(lost.kept for lost in result.lost)
    causes: Counter[str] = Counter()
    for lost in result.lost:
        causes[lost.cause] += lost.missing
    return (
        f"{counted(len(result.lost), 'group')} lost between selection and update: {missing} of {kept} kept rollouts are "
        f"missing: {causes_text(causes)}"
    )


def partial_groups_text(result: StepResult) -> str | None:
    """A sentence about the rollouts that trained groups went without, with the causes; None where there are none."""
    trained = set(result.trained)
    causes = Counter(rollout.cause for rollout in result.missing if rollout.locator.group in trained)
    if not causes:
        return None
    return (
        f"{counted(causes.total(), 'rollout')} lost between selection and update, their groups trained without them: "
        f"{causes_text(causes)}"
    )


def causes_text(causes: Mapping[str, int]) -> str:
    """The most frequent causes with their counts, in one sentence of bounded length."""
    ranked = Counter(causes).most_common()
    shown = [f"{_short(cause)} ({count})" for cause, count in ranked[:CAUSES_SHOWN]]
    if more := ranked[CAUSES_SHOWN:]:
        shown.append(f"{counted(len(more), 'other cause')} ({sum(count for _, count in more)})")
    return "; ".join(shown) or "cause unknown"


def _short(cause: str) -> str:
    line = " ".join(cause.split())
    return line if len(line) <= CAUSE_LENGTH else f"{line[: CAUSE_LENGTH - 1]}…"
