"""The controller: a named Ray actor that builds the stages of a run, drives its loop and answers about it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import ray
import yaml

from pods_cluster.config import Config, dump_config
from pods_cluster.data import load_eval, load_prompts, load_tokenizer, resolved, reward_columns
from pods_cluster.data.model_files import check_models
from pods_cluster.environments.description import check_turns
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.learning.learner_group import LearnerGroup
from pods_cluster.run import checkpoints
from pods_cluster.run.cluster import hint_autoscaler, nccl_can_reach
from pods_cluster.run.errors import RunError
from pods_cluster.run.hub_upload import push
from pods_cluster.run.live_file import remove_live_file, write_live_file
from pods_cluster.run.loop import Run
from pods_cluster.run.recovery import FAULTS, Recovery
from pods_cluster.run.reward_log import RewardLog
from pods_cluster.run.selector_handle import SelectorHandle
from pods_cluster.run.status import LiveStatus, live_status
from pods_cluster.scoring.reward_probe import probe_rewards
from pods_cluster.scoring.scorer_output import Printed
from pods_cluster.selection.policy import selection_policy
from pods_cluster.sizing.moves import ScaleError, Sizes
from pods_cluster.telemetry.recorder import Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.settings import describe_changes
from pods_cluster.telemetry.step_record import Feed
from pods_cluster.telemetry.summary import Summary, write_summary
from pods_cluster.weights.broadcast import Broadcaster

CLOSE_SECONDS = 60.0

log = logging.getLogger(__name__)


class Controller:
    """Actor of one run.

    `open` refuses what can be refused before a process starts. `run` opens the run if that was not done, and returns its
    summary when it is done or was stopped. The other methods answer meanwhile. The tasks of the event loop are drawn at
    the top of `loop`.
    """

    def __init__(self, config: Config, resume: bool, *, save: bool = True, after: str = "") -> None:
        """`after`: why this controller goes on in place of another one."""
        self.config = config
        self._save = save
        self._resume, self._after = resume, after
        self._stop_reason: str | None = None
        self._run: Run | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._selector: SelectorHandle | None = None
        self._recovery: Recovery | None = None
        self._closing: list[Any] = []
        self._opened = False
        self._log_failed = False

    async def open(self) -> int:
        """Load the data, make the run's folder and its recorder, and refuse what can be refused without a process.
        Returns the steps of the run.

        No part of the constructor: what an actor's constructor raises arrives as the actor's death. It may take long, so
        that it runs on a thread, and the controller answers meanwhile.
        """
        await asyncio.to_thread(self._open, ray.get_runtime_context().gcs_address)
        self._opened = True
        return self.config.run.steps

    def _open(self, gcs_address: str) -> None:
        config, resume = self.config, self._resume
        selection_policy(config)
        check_models(config)
        self.tokenizer = load_tokenizer(config.model, light=True)
        self.stream = load_prompts(config, self.tokenizer)
        config = self.config = resolved(config, self.tokenizer, len(self.stream))
        self.held_out = load_eval(config, self.tokenizer) if config.run.eval.on else []
        check_turns(config, self.tokenizer)
        printed = Printed()
        if config.scoring.preload:
            printed = probe_rewards(config.reward, config.scoring, reward_columns(self.stream)).printed
        text = dump_config(config)
        changed, refused, self.checkpoint = "", list[str](), None
        if resume:
            before = yaml.safe_load(RunFolder.open(Path(config.run.dir) / config.run.name).config.read_text("utf-8"))
            changed = describe_changes(before if isinstance(before, dict) else {}, yaml.safe_load(text))
            self.folder = RunFolder.resume(config.run.dir, config.run.name, text)
            with self.folder.lock():  # what is half written is removed, and nobody may be writing it
                self.checkpoint, refused = checkpoints.newest_sound(self.folder.checkpoints, self.folder.copies)
        else:
            self.folder = RunFolder.create(config.run.dir, config.run.name, text)
        self._reward_log = RewardLog(self.folder.rewards_log)
        resumed_from = checkpoints.read_state(self.checkpoint).step if self.checkpoint else 0
        self.recorder = Recorder.for_run(
            self.folder,
            resumed_from=resumed_from if resume else None,
            tensorboard=config.run.tensorboard,
            wandb=config.run.wandb,
            mlflow=config.run.mlflow,
            trackio=config.run.trackio,
            # trackers have no use for pickled functions
            config=config.model_dump(mode="json", exclude={"reward": {"__all__": {"code"}}, "environment": {"code"}}),
        )
        if self._after:
            self.recorder.event("restarting", self._after, level="warning")
        if changed:
            self.recorder.event("settings_changed", f"resumed with other settings: {changed}")
        for fault in refused:
            self.recorder.event(
                "checkpoint_refused", f"{fault}; the run goes on from the checkpoint before", level="warning"
            )
        write_live_file(self.folder, gcs_address)
        self._log_printed("controller", printed)

    async def process(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def run(self) -> Summary:
        """Run to the end; returns the summary. Raises what ended the run; its processes are gone then either way."""
        if not self._opened:
            await self.open()
        if self._stop_reason is not None:
            await self._close()
            raise RunError(f"stopped while starting: {self._stop_reason}")
        try:
            self._starting = asyncio.ensure_future(self._start())
            run = await self._starting
            if self._stop_reason is not None:
                run.stop(self._stop_reason)
            await self._run_to_the_end(run)
            if self.config.run.push_to_hub is not None and self._save and run.stop_reason is None:
                target, private = self.config.run.push_to_hub, self.config.run.hub_private
                done, text = await push(self.folder.model, target, private=private)
                run.notice("hub", text, level="info" if done else "warning")
            return await self._summary(run)
        except asyncio.CancelledError:
            raise RunError(f"stopped while starting: {self._stop_reason or 'cancelled'}") from None
        except BaseException as error:
            self.recorder.event("failed", f"{type(error).__name__}: {error}", level="error")
            raise
        finally:
            await self._close()

    async def _run_to_the_end(self, run: Run) -> None:
        assert self._recovery is not None
        while True:
            try:
                await run.main(save=self._save)
                return
            except FAULTS as error:
                if not self.config.run.restarts:
                    raise
                await self._recovery.after(error)

    async def poll(self, cursor: int = 0) -> Feed:
        """Steps and events since `cursor`."""
        return self.recorder.poll(cursor) if self._opened else Feed(cursor, [], 0)

    async def stop(self, reason: str) -> None:
        """End the run after what it is doing and save its state; one that is still starting ends at once."""
        self._stop_reason = reason
        if self._run is not None:
            self._run.stop(reason)
        elif self._starting is not None:
            self._starting.cancel()

    async def scale(self, generators: int | None = None, learners: int | None = None) -> str:
        """Give the pools new sizes while the run goes on; returns what is done, in a sentence. Raises ScaleError."""
        if self._run is None:
            raise ScaleError("the run is still starting; ask again when its workers are up")
        if self._run.stop_reason is not None:
            raise ScaleError(f"the run ends ({self._run.stop_reason}); its pools stay as they are")
        if self._run.recovering is not None:
            raise ScaleError(f"the run is {self._run.recovering}; ask again when it goes on")
        return self._run.scaler.request(generators, learners)

    async def status(self) -> LiveStatus:
        """The run's step and weight version, the sizes of its pools, and every worker."""
        return live_status(self.config, self._run, self._stop_reason)

    async def _start(self) -> Run:
        config, name = self.config, self.config.run.name
        self.recorder.event("starting", f"starting {Sizes(config.generator.workers, config.learner.workers)}")
        self._selector = selector = SelectorHandle.start(config, name)
        pool = GeneratorPool(config, selector.handle, printed=self._log_printed)
        learners = LearnerGroup(config)
        self._closing = [pool, learners]
        if 0 < (config.learner.gpus_per_worker or 0) < 1:
            await learners.place_ranks(config.cluster.placement_timeout)
        starts = [asyncio.ensure_future(pool.start()), asyncio.ensure_future(learners.start())]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            raise
        publisher = start_broadcaster(config, learners, pool)
        run = Run(
            config,
            pool=pool,
            selector=selector,
            learners=learners,
            publisher=publisher,
            stream=self.stream,
            held_out=list(self.held_out),
            recorder=self.recorder,
            folder=self.folder,
            hint=lambda sizes: asyncio.to_thread(hint_autoscaler, config, sizes),
        )
        if self.checkpoint is not None:
            await run.restore(self.checkpoint)
        self._recovery = Recovery(config, run, pool=pool, selector=selector, learners=learners, publisher=publisher)
        self._run = run
        self._closing.insert(0, run.scaler)
        for choice in learners.infos[0].choices:
            self.recorder.event("learner", choice)
        self.recorder.event("started", "all workers are up")
        return run

    def _log_printed(self, worker: str, printed: Printed) -> None:
        try:
            self._reward_log.write(worker.removeprefix(f"{self.config.run.name}/"), printed)
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                text = f"{self._reward_log.path}: what rewards print cannot be written ({error}); training goes on"
                self.recorder.event("telemetry", text, level="warning")

    async def _summary(self, run: Run) -> Summary:
        reason = run.stop_reason
        self.recorder.event(
            "finished", f"stopped at step {run.step}: {reason}" if reason else f"done: {run.step} steps"
        )
        await asyncio.to_thread(self.recorder.flush)
        return await asyncio.to_thread(write_summary, self.folder, status="stopped" if reason else "finished")

    async def _close(self) -> None:
        for stage in self._closing:
            try:
                await asyncio.wait_for(stage.close(), CLOSE_SECONDS)
            except Exception as error:  # what is being thrown away may already be broken
                log.warning("closing %s: %s", type(stage).__name__, error)
        selector = self._recovery.selector if self._recovery is not None else self._selector
        if selector is not None:
            with contextlib.suppress(Exception):
                selector.close()
        remove_live_file(self.folder)
        await asyncio.to_thread(self.recorder.close)


def start_broadcaster(config: Config, learners: LearnerGroup, pool: GeneratorPool) -> Broadcaster:
    """A broadcaster of weights from the ranks of a learner group that has started to the workers of a pool."""
    return Broadcaster(
        learners.handles,
        config.weights,
        config.run.name,
        gpus=nccl_can_reach(config, ray.cluster_resources().get("GPU", 0.0)),
        ranks_per_worker=config.generator.tensor_parallel,
        process_of=pool.process_of,
    )
