"""The run: generate, select, update, publish, again and again, until its steps are done or it is told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.messages import Failure
from pods_cluster.generation.pool_stats import PoolStats
from pods_cluster.learning.learner_group import StepResult
from pods_cluster.learning.rank_actors import LearnerError
from pods_cluster.run import checkpoints
from pods_cluster.run.evaluation import evaluate
from pods_cluster.run.stages import Generators, Learners, Publisher, Selector
from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.run.step_assembly import Assembler, RunError
from pods_cluster.run.step_numbers import StageClock, Tally
from pods_cluster.sizing.balance import Balancer
from pods_cluster.sizing.idle import IdleShare, tokens_per_second
from pods_cluster.sizing.moves import Sizes
from pods_cluster.sizing.scaler import Scaler
from pods_cluster.sizing.step_measurement import StepMeasurement
from pods_cluster.telemetry.process_memory import process_memory
from pods_cluster.telemetry.recorder import Level, Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import SampleGroup
from pods_cluster.types import Fate, Prompt, Selection

EMPTY_STEPS = 5
"""So many steps in a row without one trainable group end the run: it would only burn generator time."""

__all__ = ["Run", "RunError"]


class Run:
    """The loop over its stages. Everything outside it is reached through the protocols of `stages`.

    `version` is the learner's weight version: the number of updates applied. `staleness` k of the configuration
    bounds how many steps' groups are out; prompts are issued after a publish, so that with k = 0 every token is
    sampled from the weights that the step then updates.
    """

    def __init__(
        self,
        config: Config,
        *,
        pool: Generators,
        selector: Selector,
        learners: Learners,
        publisher: Publisher,
        stream: PromptStream,
        held_out: list[Prompt],
        recorder: Recorder,
        folder: RunFolder,
        hint: Callable[[Sizes | None], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self.pool, self.selector, self.learners, self.publisher = pool, selector, learners, publisher
        self.stream, self.held_out, self.recorder, self.folder = stream, held_out, recorder, folder
        self.ledger = Ledger(config.learner.prompts_per_step, config.staleness)
        self.step = 0
        self.version = 0
        self.seconds = 0.0
        self.trained_tokens = 0
        """Prompt and completion tokens that the learner has trained on."""
        self.stop_reason: str | None = None
        self.idle = IdleShare()
        self.balancer = Balancer(config)
        self._empty_steps = 0
        self._saved_at: int | None = None
        self._sampled: list[SampleGroup] = []
        self.assembler = Assembler(
            config,
            pool,
            selector,
            stream,
            self.ledger,
            notice=self._notice,
            stopping=self._stopping,
            on_failure=self._replace_worker,
            on_selected=self._sample,
            size=config.generator.rollouts_per_prompt,
        )

        self.scaler = Scaler(
            config,
            pool=pool,
            learners=learners,
            publisher=publisher,
            notice=self._notice,
            lose=lambda failure: self.assembler.lose_worker(failure, self.assembler.held_by(failure)),
            hint=hint,
        )

    def stop(self, reason: str) -> None:
        """End after what is being done now; the state is saved."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self._notice("stopping", reason)

    async def restore(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimiser, schedule, streams and counts. Raises CheckpointError."""
        state = checkpoints.read_state(path)
        await self.learners.load(path / "learner")
        self.stream.restore(state["stream"])
        self.ledger.restore(state["ledger"])
        for epoch, row, count in state["attempts"]:
            self.assembler.attempts[(epoch, row)] = count
        self.balancer.restore(int(state.get("rollouts_per_prompt", self.balancer.rollouts)))
        self.assembler.size = self.balancer.rollouts
        self.step, self.version = int(state["step"]), int(state["version"])
        self.seconds = float(state.get("seconds", 0.0))
        self.trained_tokens = int(state.get("trained_tokens", 0))
        self._saved_at = self.step
        self._notice("resumed", f"continuing from {path.name}: step {self.step}, weight version {self.version}")

    async def main(self, *, save: bool = True) -> None:
        """Run to the last step, or until `stop`; without `save` (a calibration) nothing is left of it but metrics.

        Raises RunError, or what a stage raised.
        """
        # The generators may hold other weights than the learner, and always do after a resume.
        await self._publish({})
        if self.step == 0:
            await self._evaluate()
        await _run_with(self._steps(), *([self.assembler.attend()] if self.config.selector.settle != "off" else []))
        await self._finish(save)

    async def _steps(self) -> None:
        while not self._over() and not self._stopping():
            await self._one_step()

    async def _one_step(self) -> None:
        clock = StageClock()
        tally = Tally()
        taken, dropped = self.stream.taken, self.stream.dropped
        with clock("scale"):
            await self.scaler.at_boundary(self.version)
        in_flight = len(self.ledger.out)
        with clock("generate"):
            await self.assembler.issue(self.ledger.room, self.version)
        with clock("scale"):
            await self._rebuild_learners()  # the generators work meanwhile
        with clock("generate"):
            selections = await self.assembler.collect(self.version, tally)
        if self._stopping():
            # what was selected is not trained: its prompts come again
            await self.assembler.give_back(list(self.assembler.out), Fate.CANCELLED)
            return
        values: dict[str, float] = {}
        result: StepResult | None = None
        assembled_at = self.version
        if selections:
            self._empty_steps = 0
            result = await self._train(selections, clock, tally, values)
        else:
            self._no_groups(tally)
        self.step += 1
        if self._sampled:
            self.recorder.samples(self.step, self._sampled)
            self._sampled = []
        seconds = clock.total()
        self.seconds += seconds
        values |= tally.values(assembled_at) | clock.timings() | {"timing_s/step": seconds}
        values["weights/version"] = self.version
        values["groups/in_flight"] = len(self.ledger.out)
        values |= {
            "epoch": self.stream.epochs,
            "num_tokens": self.trained_tokens,
            "data/prompts_served": self.stream.taken - taken,
            "data/prompts_dropped_overlong": self.stream.dropped - dropped,
        } | process_memory().metrics("controller")
        stats = await self.pool.stats()
        step = self._measured(seconds, clock, tally, result, stats)
        values |= stats.metrics() | self.scaler.values() | self.idle.after_step(step)
        values |= self.balancer.after_step(step, in_flight=in_flight, ready=tally.ready or 0, waited=tally.waited)
        self.assembler.size = self.balancer.rollouts
        if self._due(self.config.run.eval.every) or self._over():
            values |= await self._evaluate(record=False)
        if self._due(self.config.run.checkpoint.every):
            with clock("checkpoint"):
                await self._save()
            values["timing_s/checkpoint"] = clock.seconds["checkpoint"]
        self.recorder.step(self.step, values)

    def _measured(
        self, seconds: float, clock: StageClock, tally: Tally, result: StepResult | None, stats: PoolStats
    ) -> StepMeasurement:
        sizes = self.scaler.now()
        return StepMeasurement(
            seconds=seconds,
            generate_seconds=clock.seconds["generate"],
            fetch_seconds=result.fetch_seconds if result is not None else 0.0,
            update_seconds=result.update_seconds if result is not None else 0.0,
            publish_seconds=clock.seconds.get("publish", 0.0),
            generated_rollouts=tally.generated,
            trained_rollouts=result.trained_rollouts if result is not None else 0,
            sampled_tokens=tally.sampled_tokens,
            aborted_tokens=tally.aborted_tokens,
            trained_tokens=result.trained_tokens if result is not None else 0,
            generators=max(1, sizes.serving),
            ranks=max(1, sizes.learners),
            generator_rate=tokens_per_second(stats.generated_tokens, stats.seconds),
            best_generator_rate=stats.saturated,
            occupied_seconds=stats.occupied_seconds_mean,
            groups_in_flight=len(self.ledger.out),
        )

    async def _train(
        self, selections: list[Selection], clock: StageClock, tally: Tally, values: dict[str, float]
    ) -> StepResult:
        """Train the step and publish the new weights; adds the learner's metrics and those of the weights to `values`."""
        result = await self.learners.train(selections, self.step)
        for group in result.trained:
            self.assembler.end(group, Fate.TRAINED)
            tally.fates[Fate.TRAINED] += 1
        if result.lost:
            causes = "; ".join(map(str, result.lost))
            self._notice("groups_lost", f"{len(result.lost)} group(s) were lost between selection and update: {causes}")
            tally.fates[Fate.LOST] += len(result.lost)
            await self.assembler.give_back([lost.group for lost in result.lost], Fate.LOST)
        await self.pool.drop([selection.group for selection in selections])
        values |= {name: float(value) for name, value in result.metrics.items()}
        values |= {
            "updates": float(result.updates),
            "rollouts/trained": float(result.trained_rollouts),
            "tokens/trained": float(result.trained_tokens),
            "learner/received_bytes": float(result.received_bytes),
            "learner/busy_seconds": result.busy_seconds,
            "timing_s/fetch": result.fetch_seconds,
            "timing_s/update": result.update_seconds,
        }
        values |= result.memory.metrics("learner")
        self.trained_tokens += result.total_tokens
        if result.trained_rollouts:
            self.version += 1
            with clock("publish"):
                await self._publish(values)
        return result

    async def _publish(self, values: dict[str, float]) -> None:
        """New weights to every generator; those that cannot take them are replaced and brought up to date."""
        report = await self.publisher.publish(self.version, dict(self.pool.workers))
        values |= {
            "weights/bytes": float(report.nbytes),
            "weights/sync_seconds": report.seconds,
            "weights/receivers": float(len(self.pool.workers) - len(report.failed)),
            "weights/failed": float(len(report.failed)),
            "weights/rebuilds": float(report.rebuilt),
        }
        for worker, reason in report.failed.items():
            self._notice("worker_failed", f"{worker} did not take version {self.version}: {reason}")
            for failure in await self.pool.fail(worker, reason):
                await self.assembler.lose_worker(failure, self.assembler.held_by(failure))

    async def _rebuild_learners(self) -> None:
        if not self.scaler.rebuild_is_due:
            return
        passage = checkpoints.begin(self.folder.checkpoints, self.step)
        try:
            await self.scaler.rebuild_learners(passage / "learner")
        except LearnerError:
            if (passage / "learner").is_dir() and self._saved_at != self.step:
                path = checkpoints.finish(passage, self._state(), self.config.run.checkpoint.keep)
                self._notice("checkpoint", f"saved {path.name} before the learner group was lost; --resume goes on")
            raise
        checkpoints.discard(passage)

    async def _replace_worker(self, failure: Failure) -> None:
        if not self.scaler.wants_replacement(failure):
            return
        name = await self.pool.replace(failure.worker)
        report = await self.publisher.catch_up(self.version, name, self.pool.workers[name])
        if report.failed:
            raise RunError(f"{name}, started in place of {failure.worker}, took no weights: {report.failed[name]}")
        self._notice("worker_replaced", f"{name} serves version {self.version} in place of {failure.worker}")

    async def _evaluate(self, record: bool = True) -> dict[str, float]:
        if not self.held_out or not self.config.run.eval.every:
            return {}
        started = time.monotonic()
        report = await evaluate(self.pool, self.held_out, self.config)
        self.recorder.evaluation(self.step, report.rows)
        values = report.values | {"timing_s/eval": time.monotonic() - started, "eval/version": float(self.version)}
        if record:
            self.recorder.step(self.step, values)
        return values

    async def _sample(self, selection: Selection) -> None:
        """Hold a whole group for people to read: every rollout, before those left out are forgotten."""
        every = self.config.run.samples_every
        if not every or (self.step + 1) % every or len(self._sampled) >= self.config.run.samples_groups:
            return
        prompt = self.assembler.out[selection.group]
        self._sampled.append(
            SampleGroup(
                selection.group,
                prompt.text,
                await self.pool.sample(selection.group),
                kept=[locator.index for locator in selection.locators],
                answer=prompt.answer,
                rule=self.config.selector.rule,
                reason=f"{len(selection)} of {selection.group_valid} scored rollouts by {self.config.selector.rule}",
            )
        )

    def _no_groups(self, tally: Tally) -> None:
        self._empty_steps += 1
        fates = ", ".join(f"{count} {fate.value}" for fate, count in tally.fates.items()) or "none came"
        text = f"step {self.step + 1} has no group to train on ({fates}); the weights stay as they are"
        self._notice("empty_step", text)
        if self._empty_steps >= EMPTY_STEPS:
            raise RunError(
                f"{text}. This is the {EMPTY_STEPS}th step in a row: look at the rewards (all equal, or failing?) in "
                f"{self.folder.path / 'samples.jsonl'} and events.jsonl, raise generator.rollouts_per_prompt, or set "
                f"selector.no_signal: keep"
            )

    async def _save(self) -> None:
        if self._saved_at == self.step:
            return
        temporary = checkpoints.begin(self.folder.checkpoints, self.step)
        await self.learners.save(temporary / "learner")
        await self.learners.export(temporary / "model")
        path = checkpoints.finish(temporary, self._state(), self.config.run.checkpoint.keep)
        self._saved_at = self.step
        self._notice("checkpoint", f"saved {path.name}")

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "seconds": self.seconds,
            "trained_tokens": self.trained_tokens,
            "seed": self.config.run.seed,
            # groups that are out now are not trained in this state: its stream serves their prompts again
            "stream": self.stream.state(list(self.assembler.out.values())),
            "ledger": self.ledger.state(),
            "attempts": self.assembler.attempts_to_save(),
            "rollouts_per_prompt": self.balancer.rollouts,
        }

    async def _finish(self, save: bool) -> None:
        if self.assembler.out:
            await self.assembler.give_back(list(self.assembler.out), Fate.CANCELLED)
        if not save:
            return
        await self._save()
        if self.config.run.export:
            await self.learners.export(self.folder.model)

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _over(self) -> bool:
        """Whether the last step is done, or the time that the run was given."""
        limit = self.config.run.max_seconds
        return self.step >= self.config.run.steps or (limit is not None and self.seconds >= limit)

    def _stopping(self) -> bool:
        return self.stop_reason is not None

    def _notice(self, kind: str, text: str, *, level: Level = "info") -> None:
        self.recorder.event(kind, text, step=self.step, level=level)


async def _run_with(work: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end while `background` runs, which has no end of its own; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(work), *(asyncio.ensure_future(coroutine) for coroutine in background)]
    try:
        pending = set(tasks)
        while not tasks[0].done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
