"""The loop of a run: generate, select, update, publish, again and again, until its steps are done or it is told to stop.

It runs in the controller's process, on one event loop that nothing may hold up: what takes long is another process's
work or a thread's. Each task waits for one thing at a time, and every wait has a deadline.

    controller's event loop
    │
    ├─ step loop (`Run._steps`), one step after another
    │     waits for                                      woken by                        deadline
    │    1 scale     newcomers take the weights          their answers                   weights.*_timeout
    │    2 generate  (staleness 0) prompts sent          selector, then generators       60 s, generator.request_timeout
    │    3 scale     learner group of another size       the ranks' answers              learner.*_timeout
    │    4 generate  `prompts_per_step` selections       a worker's report to the        run.step_timeout for all,
    │                                                    selector, at least each second  31 s for each answer
    │    5 fetch     ranks take the kept rollouts        the workers' answers            60 s
    │    6 update    ranks train                         the ranks' answers              learner.step_timeout
    │    7 publish   generators take the new weights     their answers                   weights.*_timeout
    │    8 measure   the generators' statistics, asked   their answers                   15 s
    │                before 5
    │    9 eval      (each so many steps)                generators' answers             generator.request_timeout
    │   10 checkpoint (when one is due)                  ranks' answers, a thread        learner.step_timeout
    │
    ├─ instructions (`Assembler.pass_instructions`, with selector.settle), also while the ranks train
    │     waits for the selector to ask for a group's next wave or its abort; woken by a worker's report to the selector,
    │     at least each second (31 s). It shares the lock `Assembler._sending` with the step loop, which holds it while
    │     groups are given up and while a worker is replaced.
    │
    ├─ issue (`ContinuousIssue.run`, with staleness above 0), also while the ranks train
    │     waits for a free slot of the ledger, then for an engine with room (asked again each second, 16 s); announces and
    │     sends groups, under the same lock. It rests between an update and the end of its publish.
    │
    ├─ scaling (`Scaler`, while the pools change): a task for each generator that starts (cluster.scale_timeout for a place,
    │     then generator.start_timeout) or leaves (cluster.drain_timeout), and one that reserves room for learner ranks
    │     (cluster.scale_timeout). Woken by Ray and by the workers' answers. The step loop takes in what ended, at 1 and 3.
    │
    ├─ nodes (`Scaler.watch_nodes`): asks Ray each 2 s which nodes are about to go; their generators are drained and replaced
    │
    ├─ calls (`Controller.poll`, `status`, `scale`, `stop`): answered between two awaits of these tasks. The step loop sees
    │     a stop within a second at 4, and else when its step is over.
    │
    ├─ watch (`LearnerGroup.watch`): asks every rank each 2 s whether it lives; 30 s of silence (120 s while a state is written
    │     or read), 4 s of one whose process is stopped, or some 8 s of one whose node cannot be reached, end the loop.
    │
    └─ by a queue, not waiting ──▶ recorder thread (`Recorder._drain`): woken by each step, event and sample, at least each
          2 s, and writes it to every sink. A sink that hangs costs lines, not steps.

A lost selector is replaced by `recovery` while the loop waits for its answer. A task that raises ends the others
(`_run_with`). Where the learner is gone, `recovery` starts it again and the loop goes on from the newest state; any other cause
ends the run, and is what `pods train` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from pods_cluster.learning.reports import StepResult
from pods_cluster.run.errors import RunError
from pods_cluster.run.evaluation import evaluate
from pods_cluster.run.parts import RunParts
from pods_cluster.run.step_numbers import StageClock, Tally, measure
from pods_cluster.telemetry.process_memory import process_memory
from pods_cluster.types import Selection

EMPTY_STEPS = 5
"""Steps in a row without one trainable group after which the run ends: it would only burn generator time."""
ALL_EQUAL = "rewards of a group all equal? Raise generator.rollouts_per_prompt, or set selector.no_signal: keep"


class Run(RunParts):
    """The loop over its stages, which it knows by the protocols of `stages` alone.

    `staleness` k of the configuration bounds how many steps' groups are in flight. With k = 0 prompts are issued after a
    publish alone, so that every token is sampled from the weights that the step then updates.
    """

    _copying = True
    """Whether light copies are made: not in a calibration."""

    async def main(self, *, save: bool = True) -> None:
        """Run to the last step, or until `stop`; without `save` (a calibration) nothing is left of it but metrics.

        Raises RunError, or what a stage raised.
        """
        self._copying = save
        background = [self.learners.watch(), self.scaler.watch_nodes()]
        if self.config.selector.settle != "off":
            background.append(self.assembler.pass_instructions())
        if self.assembler.continuous.on:
            background.append(self.assembler.continuous.run())
        try:
            await _run_with(self._steps(), *background)
        finally:
            self.rewards.tell_all()
        if save:
            await _run_with(self._save_the_end(), self.learners.watch())
        await self.copies.end(remove=save)

    async def _save_the_end(self) -> None:
        with self._learner_at_work():
            await self.saver.save_last(self.state(), self.folder.model if self.config.run.export else None)

    async def _steps(self) -> None:
        # The generators may hold other weights than the learner, and always do after a resume.
        await self.updates.publish()
        if self._evaluation_owed:
            await self._evaluate()
            self._evaluation_owed = False
        while self.stop_reason is None and not self._over():
            await self._one_step()
        await self.assembler.cancel_all()

    async def _one_step(self) -> None:
        clock, tally = StageClock(), Tally()
        with clock("scale"):
            await self.scaler.at_boundary(self.version)
        left = len(self.ledger.in_flight)
        in_flight = min(left, self.updates.left_in_flight) if self.assembler.continuous.on else left
        with clock("generate"):
            await self.assembler.fill(self.version)
        with clock("scale"):
            if self.scaler.rebuild_is_due:  # the generators work meanwhile
                with self._learner_at_work():
                    await self.saver.save_if_lost(self.state(), self.scaler.rebuild_learners)
        with clock("generate"):
            selections = await self.assembler.collect(self.version, tally)
        if self.stop_reason is not None:
            return  # what was selected is not trained: `main` cancels it, and its prompts come again
        assembled_at = self.version
        # Asked now, so that the answers come while the learner trains: between two steps the learner would wait for them.
        asked = asyncio.ensure_future(self.pool.stats())
        try:
            result, values = await self._train(selections, clock, tally)
        except BaseException:
            asked.cancel()
            raise
        self.step += 1
        self.learner_changes = False
        seconds = clock.total()
        self.seconds += seconds  # before the question whether the run is over: this step may have used up its time
        due = self.config.run.eval.is_due(self.step, self.seconds, self.seconds - seconds)
        evaluating = self._evaluation_owed = due or self._over()
        if not evaluating:  # else the learner would wait for an evaluation behind what it does not need yet
            self.assembler.continuous.serve(self.version)
        values |= tally.values(assembled_at) | clock.timings() | {"timing_s/step": seconds}
        values["weights/version"] = self.version
        values["groups/in_flight"] = len(self.ledger.in_flight)
        values["num_tokens"] = self.updates.trained_tokens
        self.assembler.supply.history.adapt()
        values |= self.assembler.supply.metrics() | process_memory().metrics("controller")
        stats = await asked
        self.rewards.look(self.pool.scoring)
        measured = measure(seconds, clock, tally, result, stats, self.scaler.now(), len(self.ledger.in_flight))
        values |= stats.metrics() | self.scaler.values() | self.idle.after_step(measured)
        values |= self.balancer.after_step(measured, in_flight=in_flight, ready=tally.ready or 0, waited=tally.waited)
        self.assembler.set_group_size(self.balancer.rollouts)
        await self._end_step(values, clock, evaluating)

    async def _train(
        self, selections: list[Selection], clock: StageClock, tally: Tally
    ) -> tuple[StepResult | None, dict[str, float]]:
        """Train the step and publish its weights; without a group to train on nothing but count that."""
        result, values = None, dict[str, float]()
        if selections:
            self._empty_steps = 0
            self.learner_changes = True  # until the step counts
            result, values = await self.updates.train(selections, self.step, clock, tally)
        if samples := self.samples.of_step({lost.group for lost in result.lost} if result else ()):
            self.recorder.samples(self.step + 1, samples)
        if not selections:
            self._no_groups(tally)
        return result, values

    async def _end_step(self, values: dict[str, float], clock: StageClock, evaluating: bool) -> None:
        """Evaluate and save where that is due, and record the step, whatever becomes of these."""
        try:
            if evaluating:
                values |= await self._evaluate(record=False)
                with self._learner_at_work():
                    await self.best.after_evaluation(self.step, values)
                self._evaluation_owed = False
                self.assembler.continuous.serve(self.version)
            if self.saver.is_due(self.step):
                with clock("checkpoint"), self._learner_at_work():
                    await self.saver.save(self.state())
                values["timing_s/checkpoint"] = clock.seconds["checkpoint"]
            elif self._copying and self.copies.is_due(self.step):
                values["timing_s/copy"] = await self.copies.begin(self.state())
            values |= self.saver.metrics()
        finally:
            self.recorder.step(self.step, values)

    @contextlib.contextmanager
    def _learner_at_work(self) -> Iterator[None]:
        self.learner_changes = True
        yield
        self.learner_changes = False

    async def _evaluate(self, record: bool = True) -> dict[str, float]:
        if not self.held_out or not self.config.run.eval.on:
            return {}
        started = time.monotonic()
        report = await self.rewards.during(evaluate(self.pool, self.held_out, self.config), self.pool)
        self.recorder.evaluation(self.step, report.rows)
        values = report.values | {"timing_s/eval": time.monotonic() - started, "eval/version": float(self.version)}
        if record:
            self.recorder.step(self.step, values)
        return values

    def _no_groups(self, tally: Tally) -> None:
        self._empty_steps += 1
        fates = ", ".join(f"{count} {fate.value}" for fate, count in tally.fates.items()) or "none came"
        text = f"step {self.step + 1} has no group to train on ({fates}); the weights stay as they are"
        self.notice("empty_step", text)
        if self._empty_steps >= EMPTY_STEPS:
            raise RunError(f"{text}. This is the {EMPTY_STEPS}th step in a row; {self.rewards.describe() or ALL_EQUAL}")

    def _over(self) -> bool:
        """Whether the last step is done, or the time that the run was given."""
        limit = self.config.run.max_seconds
        return self.step >= self.config.run.steps or (limit is not None and self.seconds >= limit)


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
