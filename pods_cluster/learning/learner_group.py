"""The learner group: all ranks in step, driven from the controller's event loop. Every wait has a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pods_cluster.config import Config
from pods_cluster.learning.checkpoint_format import divisible
from pods_cluster.learning.rank import RankMemory
from pods_cluster.learning.rank_actors import GRACE, LearnerError, Ranks, ResizeError
from pods_cluster.learning.schedule import learning_rate
from pods_cluster.learning.step_plan import PlanSettings, StepPlan, plan_step
from pods_cluster.learning.step_sums import Sums, summarise
from pods_cluster.types import GroupId, Selection

__all__ = ["LearnerError", "LearnerGroup", "ResizeError", "StepResult", "plan_settings"]


@dataclass(slots=True)
class StepResult:
    """One step of the learner.

    `trained` and `lost` groups together are those of the selections. `metrics` has the registry's names. `seconds` by
    stage: `fetch` (rollouts from the workers) and `update` (all forward and backward passes and optimiser steps);
    `busy_seconds` is what the slowest rank needed of the latter.
    """

    metrics: dict[str, float]
    trained: list[GroupId]
    lost: list[GroupId]
    trained_rollouts: int
    lost_rollouts: int
    trained_tokens: int
    total_tokens: int
    received_bytes: int
    updates: int
    seconds: dict[str, float]
    reasons: dict[str, int] = field(default_factory=dict)
    busy_seconds: float = 0.0


def plan_settings(config: Config, ranks: int | None = None) -> PlanSettings:
    """What a step's plan takes from the configuration; `ranks` in place of `learner.workers`."""
    learner = config.learner
    return PlanSettings(
        ranks=ranks or learner.workers,
        tokens_per_microbatch=learner.tokens_per_microbatch,
        updates_per_batch=learner.updates_per_batch,
        loss=learner.loss,
        max_tokens=config.generator.max_tokens,
        scope=learner.advantage.scope,
        normalize=learner.advantage.normalize,
        floor=config.selector.min_valid or config.selector.keep,
    )


class LearnerGroup(Ranks):
    """`learner.workers` ranks as Ray actors `<run>/learner/<i>`; after a change of size they have new indices.

    `actor_options` go to every rank's actor (one mapping), or to each its own (a sequence): scheduling strategies,
    lifetime. `fetch_timeout` bounds the taking of a step's rollouts; those that did not come are lost, the step goes
    on without them.
    """

    def __init__(
        self,
        config: Config,
        *,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        fetch_timeout: float = 60.0,
    ) -> None:
        super().__init__(config, actor_options)
        self.fetch_timeout = fetch_timeout

    async def train(self, selections: Sequence[Selection], step: int) -> StepResult:
        """Train one step (0 is the first) on these selections.

        First all ranks take their rollouts and report; then, with what was lost planned away, all of them train. A
        step of which nothing is left updates nothing (`updates` 0). Raises LearnerError, and PlanError for impossible
        selections.
        """
        plan = plan_step(selections, plan_settings(self.config, self.workers))
        began = time.monotonic()
        reports = await self._all(
            [
                rank.fetch.remote(part.locators, self.fetch_timeout)
                for rank, part in zip(self.handles, plan.ranks, strict=True)
            ],
            self.fetch_timeout + GRACE,
            "take their rollouts",
        )
        lost = {locator for report in reports for locator in report.lost}
        if lost:
            plan = plan.without(lost)
        fetched = time.monotonic()
        seconds = {"fetch": fetched - began, "update": 0.0}
        metrics: dict[str, float] = {}
        busy = 0.0
        updates = len(plan.ranks[0].updates)
        if updates:
            metrics, busy = await self._update(plan, step)
            seconds["update"] = time.monotonic() - fetched
        else:
            await self._all([rank.forget.remote() for rank in self.handles], GRACE, "drop rollouts")
        reasons: dict[str, int] = {}
        for report in reports:
            for reason, count in report.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return StepResult(
            metrics=metrics,
            trained=list(plan.groups),
            lost=list(plan.lost),
            trained_rollouts=plan.trained_rollouts,
            lost_rollouts=sum(len(selection) for selection in selections) - plan.trained_rollouts,
            trained_tokens=plan.trained_tokens,
            total_tokens=sum(part.tokens for part in plan.ranks),
            received_bytes=sum(report.nbytes for report in reports),
            updates=updates,
            seconds=seconds,
            reasons=reasons,
            busy_seconds=busy,
        )

    async def _update(self, plan: StepPlan, step: int) -> tuple[dict[str, float], float]:
        """Metrics, and the slowest rank's seconds."""
        learner = self.config.learner
        rate = learning_rate(
            step,
            peak=learner.learning_rate,
            schedule=learner.schedule,
            warmup_steps=learner.warmup_steps,
            total_steps=self.config.run.steps,
        )
        results = await self._all(
            [rank.train.remote(part, rate) for rank, part in zip(self.handles, plan.ranks, strict=True)],
            learner.step_timeout,
            "train",
        )
        total = Sums({"updates": float(len(plan.ranks[0].updates))})
        for result in results:
            total.add(result.sums)
        advantages = np.array([sequence.advantage for sequence in plan.sequences])
        padded = sum(result.padded_tokens for result in results)
        norms = results[0].grad_norms
        metrics = {
            **summarise(total.sums, total.maxima),
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "learning_rate": rate,
            "advantages/mean": float(advantages.mean()),
            "advantages/std": float(advantages.std(ddof=1)) if len(advantages) > 1 else 0.0,
            "learner/microbatches": float(results[0].microbatches),
            "learner/padding_share": 1.0 - sum(result.real_tokens for result in results) / max(padded, 1),
        }
        return metrics, max(result.seconds for result in results)

    async def score(self, sequences: Sequence[Any], temperature: float) -> list[list[float]]:
        """Log-probabilities of (prompt ids, completion ids) pairs under the learner's weights."""
        calls = [rank.score.remote(sequences, temperature) for rank in self.handles]
        return (await self._all(calls, self.config.learner.step_timeout, "score"))[0]

    async def save(self, path: Path) -> None:
        """Write a checkpoint to the folder `path`: whole afterwards, or what was there before."""
        path = Path(path).absolute()
        partial = path.with_name(path.name + ".partial")
        timeout = self.config.learner.step_timeout
        await self._all([rank.save.remote(str(partial)) for rank in self.handles], timeout, "save")
        await self._one(
            self.handles[0].commit.remote(str(partial), str(path)), timeout, "put a checkpoint in its place"
        )

    async def load(self, path: Path) -> None:
        """Read a checkpoint: weights, optimiser, random streams; whatever number of ranks has written it."""
        calls = [rank.load.remote(str(Path(path).absolute())) for rank in self.handles]
        await self._all(calls, self.config.learner.step_timeout, "load")

    async def resize(self, workers: int, folder: Path) -> None:
        """End the ranks and start `workers` new ones with the same state, which travels through `folder`.

        The processes are new because communicators and memory belong to the size that they were made for. Raises
        ResizeError when the new ones do not start and the old size works again; LearnerError when that fails too, or
        the state cannot be written (it is whole in `folder` if that exists).
        """
        before = self.workers
        if not divisible(self.config.learner):
            raise ResizeError(
                f"learner.optimizer: {self.config.learner.optimizer} keeps a state that no other number of ranks can "
                f"read; the group stays at {before}. Use adamw or adamw_fused for a group that changes its size"
            )
        await self.save(folder)
        try:
            await self._start_again(workers, folder)
        except LearnerError as error:
            self.release()
            await self._start_again(before, folder)
            raise ResizeError(f"{workers} learner rank(s) could not start ({error}); {before} go on") from error

    async def _start_again(self, workers: int, folder: Path) -> None:
        await self.end_ranks()
        self.workers = workers
        await self.start()
        await self.load(folder)

    async def export(self, path: Path) -> None:
        """Write the model in Hugging Face format (with LoRA: merged, and the adapter below `adapter/`)."""
        calls = [rank.export.remote(str(Path(path).absolute())) for rank in self.handles]
        await self._all(calls, self.config.learner.step_timeout, "export")

    async def memory(self) -> list[RankMemory]:
        return await self._all([rank.memory.remote() for rank in self.handles], GRACE, "report their memory")
