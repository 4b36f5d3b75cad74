"""The learner group: all ranks in step, driven from the controller's event loop. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray import exceptions

from pods_cluster.config import Config
from pods_cluster.learning.loss import Sums, summarise
from pods_cluster.learning.plan import PlanSettings, StepPlan, plan_step
from pods_cluster.learning.rank import LearnerRank, RankInfo, RankMemory
from pods_cluster.learning.schedule import learning_rate
from pods_cluster.names import NAMESPACE, actor_name
from pods_cluster.types import GroupId, Selection

RESOURCE = "pods_learner"
_GRACE = 30.0
_CLOSE_TIMEOUT = 10.0


class LearnerError(Exception):
    """A rank failed, died or hung. The group is broken then: close it and start another."""


@dataclass(slots=True)
class StepResult:
    """One step of the learner.

    `trained` and `lost` groups together are those of the selections. `metrics` has the registry's names. `seconds` by
    stage: `fetch` (rollouts from the workers) and `update` (all forward and backward passes and optimiser steps).
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


def plan_settings(config: Config) -> PlanSettings:
    """What a step's plan takes from the configuration."""
    learner = config.learner
    return PlanSettings(
        ranks=learner.workers,
        tokens_per_microbatch=learner.tokens_per_microbatch,
        updates_per_batch=learner.updates_per_batch,
        loss=learner.loss,
        max_tokens=config.generator.max_tokens,
        scope=learner.advantage.scope,
        normalize=learner.advantage.normalize,
        floor=config.selector.min_valid or config.selector.keep,
    )


class LearnerGroup:
    """`learner.workers` ranks as Ray actors `<run>/learner/<i>`.

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
        self.config = config
        self.fetch_timeout = fetch_timeout
        self.infos: list[RankInfo] = []
        self._settings = plan_settings(config)
        self._options = actor_options
        self._ranks: list[Any] = []
        self._broken: str | None = None

    @property
    def handles(self) -> list[Any]:
        """The ranks' actor handles, rank 0 first."""
        return list(self._ranks)

    async def start(self) -> list[RankInfo]:
        """Create the actors, let them meet, load the model. Raises LearnerError with the first rank's cause."""
        learner = self.config.learner
        threads = learner.threads or max(int(learner.cpus_per_worker), 1)
        actor = cast(Any, ray.remote)(concurrency_groups={"control": 2})(LearnerRank)
        for rank in range(learner.workers):
            self._ranks.append(
                actor.options(**self._actor_options(rank, threads)).remote(self.config, rank, learner.workers, threads)
            )
        timeout = learner.start_timeout
        host, port = await self._one(self._ranks[0].open_store.remote(timeout), timeout, "open their meeting point")
        self.infos = await self._all([rank.start.remote(host, port, timeout) for rank in self._ranks], timeout, "start")
        return self.infos

    def _actor_options(self, rank: int, threads: int) -> dict[str, Any]:
        learner = self.config.learner
        there = ray.cluster_resources()
        gpus = learner.gpus(there.get("GPU", 0.0))
        options: dict[str, Any] = {
            "name": actor_name(self.config.run.name, "learner", rank),
            "namespace": NAMESPACE,
            "num_cpus": learner.cpus_per_worker,
            "num_gpus": gpus,
            "resources": {RESOURCE: 1} if there.get(RESOURCE) else {},
            "max_restarts": 0,  # one rank cannot rejoin: the group is started again as a whole
            "runtime_env": {
                "env_vars": {"OMP_NUM_THREADS": str(threads), **({} if gpus else {"DS_ACCELERATOR": "cpu"})}
            },
        }
        extra = self._options if isinstance(self._options, Mapping) else (self._options[rank] if self._options else {})
        return {**options, **extra}

    async def train(self, selections: Sequence[Selection], step: int) -> StepResult:
        """Train one step (0 is the first) on these selections.

        First all ranks take their rollouts and report; then, with what was lost planned away, all of them train. A
        step of which nothing is left updates nothing (`updates` 0). Raises LearnerError, and PlanError for impossible
        selections.
        """
        plan = plan_step(selections, self._settings)
        began = time.monotonic()
        reports = await self._all(
            [
                rank.fetch.remote(part.locators, self.fetch_timeout)
                for rank, part in zip(self._ranks, plan.ranks, strict=True)
            ],
            self.fetch_timeout + _GRACE,
            "take their rollouts",
        )
        lost = {locator for report in reports for locator in report.lost}
        if lost:
            plan = plan.without(lost)
        fetched = time.monotonic()
        seconds = {"fetch": fetched - began, "update": 0.0}
        metrics: dict[str, float] = {}
        updates = len(plan.ranks[0].updates)
        if updates:
            metrics = await self._update(plan, step)
            seconds["update"] = time.monotonic() - fetched
        else:
            await self._all([rank.forget.remote() for rank in self._ranks], _GRACE, "drop rollouts")
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
        )

    async def _update(self, plan: StepPlan, step: int) -> dict[str, float]:
        learner = self.config.learner
        rate = learning_rate(
            step,
            peak=learner.learning_rate,
            schedule=learner.schedule,
            warmup_steps=learner.warmup_steps,
            total_steps=self.config.run.steps,
        )
        results = await self._all(
            [rank.train.remote(part, rate) for rank, part in zip(self._ranks, plan.ranks, strict=True)],
            learner.step_timeout,
            "train",
        )
        total = Sums({"updates": float(len(plan.ranks[0].updates))})
        for result in results:
            total.add(result.sums)
        advantages = np.array([sequence.advantage for sequence in plan.sequences])
        padded = sum(result.padded_tokens for result in results)
        norms = results[0].grad_norms
        return {
            **summarise(total.sums, total.maxima),
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "learning_rate": rate,
            "advantages/mean": float(advantages.mean()),
            "advantages/std": float(advantages.std(ddof=1)) if len(advantages) > 1 else 0.0,
            "learner/microbatches": float(results[0].microbatches),
            "learner/padding_share": 1.0 - sum(result.real_tokens for result in results) / max(padded, 1),
        }

    async def score(self, sequences: Sequence[Any], temperature: float) -> list[list[float]]:
        """Log-probabilities of (prompt ids, completion ids) pairs under the learner's weights."""
        calls = [rank.score.remote(sequences, temperature) for rank in self._ranks]
        return (await self._all(calls, self.config.learner.step_timeout, "score"))[0]

    async def save(self, path: Path) -> None:
        """Write a checkpoint to the folder `path`: whole afterwards, or what was there before."""
        path = Path(path).absolute()
        partial = path.with_name(path.name + ".partial")
        timeout = self.config.learner.step_timeout
        await self._all([rank.save.remote(str(partial)) for rank in self._ranks], timeout, "save")
        await self._one(self._ranks[0].commit.remote(str(partial), str(path)), timeout, "put a checkpoint in its place")

    async def load(self, path: Path) -> None:
        """Read a checkpoint: weights, optimiser, random streams."""
        calls = [rank.load.remote(str(Path(path).absolute())) for rank in self._ranks]
        await self._all(calls, self.config.learner.step_timeout, "load")

    async def export(self, path: Path) -> None:
        """Write the model in Hugging Face format (with LoRA: merged, and the adapter below `adapter/`)."""
        calls = [rank.export.remote(str(Path(path).absolute())) for rank in self._ranks]
        await self._all(calls, self.config.learner.step_timeout, "export")

    async def memory(self) -> list[RankMemory]:
        return await self._all([rank.memory.remote() for rank in self._ranks], _GRACE, "report their memory")

    async def close(self) -> None:
        """End all ranks, working or not; safe to call twice."""
        ranks, self._ranks = self._ranks, []
        if ranks and self._broken is None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_gather([rank.shutdown.remote() for rank in ranks]), _CLOSE_TIMEOUT)
        for rank in ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank)

    async def _one(self, call: Any, timeout: float, doing: str) -> Any:
        return (await self._all([call], timeout, doing))[0]

    async def _all(self, calls: Sequence[Any], timeout: float, doing: str) -> list[Any]:
        """The answers of all ranks.

        The first failure is raised at once: the others may wait for the failed one for ever.
        """
        if self._broken is not None:
            raise LearnerError(f"the learner group is broken ({self._broken}); start a new one")
        if not calls:
            raise LearnerError("the learner group is not started")
        futures = [asyncio.wrap_future(call.future()) for call in calls]
        done, pending = await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for future in futures:
            if future in done and future.exception() is not None:
                # Of several failures the one that is no consequence of another's end tells more.
                raise self._break(doing, [f.exception() for f in done if f.exception() is not None], pending)
        if pending:
            late = ", ".join(str(rank) for rank, future in enumerate(futures) if future in pending)
            for future in pending:
                future.cancel()
            self._broken = f"rank(s) {late} did not {doing} within {timeout:g} s"
            raise LearnerError(f"learner {self._broken}")
        return [future.result() for future in futures]

    def _break(self, doing: str, errors: list[BaseException | None], pending: set[asyncio.Future[Any]]) -> LearnerError:
        for future in pending:
            future.cancel()
        causes = [_cause(error) for error in errors if error is not None]
        causes.sort(key=_is_consequence)
        self._broken = causes[0]
        return LearnerError(f"learner rank(s) failed to {doing}: {causes[0]}")


def _cause(error: BaseException) -> str:
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        return f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    if isinstance(error, exceptions.RayActorError):
        return f"its process died: {error}"
    return f"{type(error).__name__}: {error}"


def _is_consequence(cause: str) -> bool:
    """Whether a failure says no more than that another rank went away."""
    return any(
        sign in cause for sign in ("Connection closed by peer", "Connection reset by peer", "gloo", "ncclRemoteError")
    )


async def _gather(calls: Sequence[Any]) -> None:
    await asyncio.gather(*(asyncio.wrap_future(call.future()) for call in calls), return_exceptions=True)
