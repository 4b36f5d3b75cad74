"""The learner group: all ranks in step, driven from the controller's event loop. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pods_cluster.config import Config
from pods_cluster.learning.rank_actors import REPLY_TIMEOUT, RankActors
from pods_cluster.learning.reports import (
    CopyReport,
    FetchReport,
    LearnerError,
    RankMemory,
    RankResult,
    ResizeError,
    StepResult,
    StorageError,
    Written,
    lost_groups,
    merge_skipped,
)
from pods_cluster.learning.schedule import learning_rate
from pods_cluster.learning.step_metrics import TokenStats, step_metrics
from pods_cluster.learning.step_plan import StepPlan, plan_settings, plan_step
from pods_cluster.telemetry.process_memory import largest_memory
from pods_cluster.types import Selection
from pods_cluster.wording import counted

if TYPE_CHECKING:
    from pods_cluster.learning.token_batch import TokenPair

__all__ = ["LearnerError", "LearnerGroup", "ResizeError", "StepResult", "StorageError"]


class LearnerGroup(RankActors):
    """`learner.workers` ranks as Ray actors `<run>/learner/<i>`; after a change of size they have new indices.

    `actor_options` (scheduling strategies, lifetime) are one mapping for all ranks' actors, or a sequence with one for
    each. Within `fetch_timeout` seconds the ranks take a step's rollouts; the step goes on without those that did not
    come.
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

        First all ranks take their rollouts and report; then the step is planned again without the missing ones, and
        all ranks train. A step of which nothing is left updates nothing (`updates` 0). Raises LearnerError, and
        PlanError for selections that cannot be planned.
        """
        packed = all(info.packed for info in self.infos)
        plan = plan_step(selections, plan_settings(self.config, self.workers, packed=packed))
        began = time.monotonic()
        reports: list[FetchReport] = await self._call_all(
            [
                rank.fetch.remote(part.locators, self.fetch_timeout)
                for rank, part in zip(self.handles, plan.ranks, strict=True)
            ],
            self.fetch_timeout + REPLY_TIMEOUT,
            "take their rollouts",
        )
        missing = [rollout for report in reports for rollout in report.missing]
        if missing:
            plan = plan.without({rollout.locator for rollout in missing})
        fetched = time.monotonic()
        metrics: dict[str, float] = {}
        results: list[RankResult] = []
        update_seconds = 0.0
        planned = len(plan.ranks[0].updates)
        if planned:
            metrics, results = await self._update(plan, step)
            update_seconds = time.monotonic() - fetched
        else:
            await self._call_all(
                [rank.drop_rollouts.remote() for rank in self.handles], REPLY_TIMEOUT, "drop their rollouts"
            )
        kept = {selection.group: len(selection) for selection in selections}
        skipped = merge_skipped(results, float16=self.config.model.dtype == "float16")
        applied = plan.sequences_of(set(range(planned)) - {skip.update for skip in skipped})
        return StepResult(
            metrics=metrics,
            trained=list(plan.groups),
            lost=lost_groups(plan.lost, kept, missing),
            trained_rollouts=len(applied),
            lost_rollouts=sum(kept.values()) - plan.trained_rollouts,
            trained_tokens=sum(sequence.trained_tokens for sequence in applied),
            total_tokens=sum(sequence.total_tokens for sequence in applied),
            received_bytes=sum(report.received_bytes for report in reports),
            updates=planned - len(skipped),
            fetch_seconds=fetched - began,
            update_seconds=update_seconds,
            busy_seconds=max((result.seconds for result in results), default=0.0),
            memory=largest_memory(result.memory for result in results),
            missing=missing,
            skipped=skipped,
        )

    async def _update(self, plan: StepPlan, step: int) -> tuple[dict[str, float], list[RankResult]]:
        """The step's metrics by registry name, and what each rank measured."""
        learner = self.config.learner
        rate = learning_rate(
            step,
            peak=learner.learning_rate,
            schedule=learner.schedule,
            warmup_steps=learner.warmup(self.config.run.steps),
            total_steps=self.config.run.steps,
        )
        results: list[RankResult] = await self._call_all(
            [rank.train.remote(part, rate) for rank, part in zip(self.handles, plan.ranks, strict=True)],
            learner.step_timeout,
            "train",
        )
        norms = results[0].grad_norms  # of the updates that were applied: there may be none
        total = TokenStats({"updates": float(len(norms))})
        for result in results:
            total.add(result.stats)
        advantages = np.array([sequence.advantage for sequence in plan.sequences])
        computed = max(sum(result.computed_tokens for result in results), 1)
        metrics = {
            **(step_metrics(total) | {"grad_norm": sum(norms) / len(norms)} if norms else {}),
            "learning_rate": rate,
            "advantages/mean": float(advantages.mean()),
            "advantages/std": float(advantages.std(ddof=1)) if len(advantages) > 1 else 0.0,
            "learner/microbatches": float(results[0].microbatches),
            "learner/padding_share": sum(result.padded_tokens for result in results) / computed,
            "learner/sequence_tokens_per_computed": sum(result.sequence_tokens for result in results) / computed,
        }
        return metrics, results

    async def score(self, sequences: Sequence[TokenPair], temperature: float) -> list[list[float]]:
        """Log-probabilities of (prompt ids, completion ids) pairs under the learner's weights."""
        calls = [rank.score.remote(sequences, temperature) for rank in self.handles]
        return (await self._call_all(calls, self.config.learner.step_timeout, "score"))[0]

    async def save(self, path: Path) -> None:
        """Write a checkpoint to the folder `path`, which afterwards holds all of it, or what it held before.

        Raises StorageError where a disk does not take it; nothing of it stays there then.
        """
        path = Path(path).absolute()
        partial = path.with_name(path.name + ".partial")
        try:
            await self._write([rank.save.remote(str(partial)) for rank in self.handles], "save")
            await self._write([self.handles[0].commit.remote(str(partial), str(path))], "put a checkpoint in its place")
        except StorageError:
            await self._call_one(
                self.handles[0].discard.remote(str(partial)), REPLY_TIMEOUT, "remove half a checkpoint"
            )
            raise

    async def _write(self, calls: Sequence[Any], doing: str) -> list[str]:
        """Calls that write to disk; what people should know of them. Raises StorageError once all ranks have answered."""
        answers: list[Written] = await self._call_all(calls, self.config.learner.step_timeout, doing)
        faults = dict.fromkeys(answer.fault for answer in answers if answer.fault is not None)
        if faults:
            raise StorageError("; ".join(faults))
        return [note for answer in answers for note in answer.notes]

    async def copy_state(self, path: Path) -> CopyReport:
        """Have all ranks copy their state to memory, and write it into the folder `path` while they go on.

        The report has the longest time that it kept a rank, and a fault where one makes no copy. Raises LearnerError.
        """
        calls = [rank.copy_state.remote(str(Path(path).absolute())) for rank in self.handles]
        return _worst(await self._call_all(calls, self.config.learner.step_timeout, "copy their state"))

    async def copy_report(self) -> CopyReport:
        """Report on the newest light copy, over all ranks. Raises RayError where one is gone."""
        calls = [asyncio.wrap_future(rank.copy_report.remote().future()) for rank in self.handles]
        return _worst(await asyncio.wait_for(asyncio.gather(*calls), REPLY_TIMEOUT))

    async def load(self, path: Path) -> None:
        """Read a checkpoint (weights, optimiser, random streams), whatever number of ranks has written it."""
        calls = [rank.load.remote(str(Path(path).absolute())) for rank in self.handles]
        await self._call_all(calls, self.config.learner.step_timeout, "load")

    async def resize(self, workers: int, folder: Path) -> None:
        """End the ranks and start `workers` new ones with the same state, which travels through `folder`.

        The processes are new because communicators and memory belong to the size that they were made for. Raises
        ResizeError when the state cannot be written, or the new ranks do not start and the old number works again;
        LearnerError when that fails too (if `folder` exists, it holds the whole state).
        """
        before = self.workers
        if not self.config.learner.resizable:
            raise ResizeError(
                f"learner.optimizer: {self.config.learner.optimizer} keeps a state that no other number of ranks can "
                f"read; the group stays at {before}. Use adamw or adamw_fused for a group that changes its size"
            )
        try:
            await self.save(folder)
        except StorageError as error:
            self.release()
            raise ResizeError(
                f"the learner's state cannot be written for another number of ranks ({error}); {before} go on. Free space"
            ) from error
        try:
            await self._restart(workers, folder)
        except LearnerError as error:
            self.release()
            await self._restart(before, folder)
            raise ResizeError(
                f"{counted(workers, 'learner rank')} could not start ({error}); {before} go on"
            ) from error

    async def start_again(self, folder: Path | None, *, patient: bool = False) -> None:
        """Start new ranks in place of those that were closed, with the state in `folder` (None: the model's weights).

        They are as many as before, or as many as there is room for: where a node is lost, now, else (or `patient`) after
        `cluster.placement_timeout`. Raises LearnerError.
        """
        await self._place_or_shrink(patient=patient)
        await self.start()
        if folder is not None:
            await self.load(folder)

    async def _restart(self, workers: int, folder: Path) -> None:
        await self.end_ranks()
        self.workers = workers
        await self.start()
        await self.load(folder)

    async def export(self, path: Path) -> list[str]:
        """Write the model in Hugging Face format (with LoRA: merged, and the adapter below `adapter/`).

        Returns what people should know of it: settings that had to be changed to be saved. Raises StorageError.
        """
        path = Path(path).absolute()
        try:
            return await self._write([rank.export.remote(str(path)) for rank in self.handles], "export")
        except StorageError:
            partial = path.with_name(path.name + ".partial")
            await self._call_one(self.handles[0].discard.remote(str(partial)), REPLY_TIMEOUT, "remove half a model")
            raise

    async def memory(self) -> list[RankMemory]:
        """Memory of each rank, rank 0 first."""
        return await self._call_all(
            [rank.memory.remote() for rank in self.handles], REPLY_TIMEOUT, "report their memory"
        )


def _worst(reports: Sequence[CopyReport]) -> CopyReport:
    """The state of a copy that all ranks make."""
    return CopyReport(
        written=all(report.written for report in reports),
        fault=next((report.fault for report in reports if report.fault), ""),
        seconds=max(report.seconds for report in reports),
    )
