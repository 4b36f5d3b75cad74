"""Recovery: the learner group or the selector of a run is started again, and its loop goes on from the newest state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.generation.messages import GeneratorError
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.learning.reports import LearnerError
from pods_cluster.run import checkpoints
from pods_cluster.run.checkpoints import RunState
from pods_cluster.run.errors import SelectorLost
from pods_cluster.run.loop import Run
from pods_cluster.run.restarts import Restarts
from pods_cluster.run.selector_handle import SelectorHandle
from pods_cluster.telemetry.number_format import first_line
from pods_cluster.weights.broadcast import Broadcaster, LearnerFailed
from pods_cluster.wording import counted

FAULTS = (LearnerError, LearnerFailed, SelectorLost)
"""Errors after which a run goes on: a part of it is gone, and nothing that it was asked for is wrong."""


class Recovery:
    """Starts again what failed of a run, at most `run.restarts` times in a row.

    The generators stay. A lost selector costs no step and no rollout: another one is told of all groups without a fate, and
    the workers report to it what they hold of them. (With `selector.settle` it would have to know what it asked for: there
    the groups come again.) A lost learner costs the steps since the newest saved state, or all of them where there is none,
    and the generators forget all groups, which come again.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        *,
        pool: GeneratorPool,
        selector: SelectorHandle,
        learners: LearnerGroup,
        publisher: Broadcaster,
    ) -> None:
        self.config, self.run = config, run
        self._pool, self._learners, self._publisher = pool, learners, publisher
        self._restarts = Restarts(config.run.restarts)
        self._selectors = 1
        self._first = run.state()
        self._use(selector)

    def _use(self, selector: SelectorHandle) -> None:
        self.selector = selector
        if self.config.run.restarts and self.config.selector.settle == "off":
            selector.repair = self._replace_selector

    async def _replace_selector(self, error: SelectorLost) -> None:
        """Put another selector in place of one that is lost, while the loop waits for its answer. Raises RunError when no
        restart is left."""
        began, run, selector = time.monotonic(), self.run, self.selector
        lost: Exception = error
        try:
            while True:
                await asyncio.sleep(self._count(lost))
                selector.replace(self.config, self.config.run.name, self._selectors)
                self._selectors += 1
                try:
                    groups = await selector.expect_again()
                except SelectorLost as again:
                    lost = again
                    continue
                await self._pool.report_again(selector.handle, groups)
                break
        finally:
            run.recovering = None
        self._restarts.going_on(run.step)
        run.notice(
            "restarted",
            f"the run goes on in step {run.step + 1} after {time.monotonic() - began:.1f} s; no step is lost, and the "
            f"workers report what they hold of {counted(len(groups), 'group')} again",
        )

    def _count(self, error: Exception) -> float:
        """Count a failure and tell it; the seconds to wait. Raises RunError when no restart is left."""
        cause = first_line(error)
        try:
            wait = self._restarts.failed(cause, self.run.step)
        except Exception as end:
            raise end from error
        self.run.recovering = f"starting again after: {cause}"
        number = f"restart {self._restarts.in_a_row} of {self._restarts.limit} (run.restarts)"
        pause = f" after {wait:g} s" if wait else ""
        self.run.notice("restarting", f"{cause}; {number}{pause}", level="warning")
        return wait

    async def after(self, error: Exception) -> None:
        """Start again what `error` says is gone; `Run.main` goes on then. Raises RunError when no restart is left."""
        began, run, patient = time.monotonic(), self.run, False
        try:
            while True:
                await asyncio.sleep(self._count(error))
                made = run.step
                try:
                    await self._start_again(error, first_line(error), patient=patient)
                except (*FAULTS, GeneratorError) as again:
                    error, patient = again, True
                    continue
                break
        finally:
            run.recovering = None
        self._restarts.going_on(run.step)
        again = f"{made - run.step} step(s) are made again" if made > run.step else "no step is lost"
        text = f"the run goes on from step {run.step} after {time.monotonic() - began:.1f} s; {again}"
        run.notice("restarted", text)

    async def _start_again(self, error: Exception, cause: str, *, patient: bool) -> None:
        run = self.run
        with contextlib.suppress(Exception):
            self.selector.close()
        self._use(SelectorHandle.start(self.config, self.config.run.name, self._selectors))
        self._selectors += 1
        if isinstance(error, SelectorLost) and not run.learner_changes:
            await run.assembler.cancel_all(told=False)
            state, saved = run.state(), run.saver.saved_step == run.step
            await self._empty_generators()
        else:
            await run.copies.end(remove=False)
            run.scaler.give_up_room()
            self._learners.give_up(cause)
            await self._learners.close()
            state, folder = await asyncio.to_thread(self._newest)
            saved = folder is not None and folder.parent.parent == run.folder.checkpoints
            await _together(
                self._learners.start_again(folder, patient=patient), self._empty_generators(), self._publisher.close()
            )
            await self._publisher.use_ranks(self._learners.handles)
            run.scaler.look_for_ranks()
            if state.step < run.step:
                await asyncio.to_thread(run.recorder.take_back, state.step)
        run.begin_again(state, self.selector, saved=saved)

    def _newest(self) -> tuple[RunState, Path | None]:
        """The newest state on disk with the folder of its learner; that of the start where there is none."""
        folder = self.run.folder
        path, refused = checkpoints.newest_sound(folder.checkpoints, folder.copies)
        for fault in refused:
            self.run.notice("checkpoint_refused", f"{fault}; the checkpoint before is used", level="warning")
        return (self._first, None) if path is None else (checkpoints.read_state(path), path / "learner")

    async def _empty_generators(self) -> None:
        """No group is left with any generator; those that cannot do that are replaced."""
        failures = await self._pool.begin_again(self.selector.handle)
        for failure in failures:
            self.run.notice("worker_failed", f"{failure.worker}: {failure.cause}; another takes its place")
        pools = self.run.scaler.now()
        short = max(self.run.scaler.target.generators - pools.serving - pools.coming, 1 if not pools.serving else 0)
        for failure in failures[:short]:
            if self._pool.serving:  # none is waited for, nor its room, where its node is gone too
                self.run.scaler.start_another(failure)
            else:
                await self._pool.replace(failure.worker)


async def _together(*work: object) -> None:
    """Await all of these; the first that raises cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]  # type: ignore[arg-type]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
