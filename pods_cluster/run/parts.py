"""The parts of a run, and the state from which it goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.messages import Failure
from pods_cluster.run import checkpoints
from pods_cluster.run.best_model import BestModel
from pods_cluster.run.checkpoints import RunState
from pods_cluster.run.copies import StateCopies
from pods_cluster.run.group_samples import GroupSamples
from pods_cluster.run.reward_watch import RewardWatch
from pods_cluster.run.saving import Saver
from pods_cluster.run.stages import Generators, Learners, Publisher, Selector
from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.run.step_assembly import Assembler
from pods_cluster.run.weight_updates import WeightUpdates
from pods_cluster.selection.selector_core import GroupFate
from pods_cluster.sizing.balance import Balancer
from pods_cluster.sizing.idle import IdleShare
from pods_cluster.sizing.moves import Sizes
from pods_cluster.sizing.scaler import Scaler
from pods_cluster.telemetry.recorder import Level, Recorder
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.types import Prompt, Selection


class RunParts:
    """The stages of a run and what it keeps beside them: counts, ledger, assembler, scaler, saver. `Run` is the loop over it."""

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
        self.pool, self.learners, self.publisher = pool, learners, publisher
        self.stream, self.held_out, self.recorder, self.folder = stream, held_out, recorder, folder
        self.step = 0
        self.seconds = 0.0
        self.stop_reason: str | None = None
        self.idle = IdleShare()
        self.balancer = Balancer(config)
        self.saver = Saver(config, learners, folder, self.notice)
        self.best = BestModel(config.run.checkpoint.best, folder, self.saver.export, self.notice)
        self.copies = StateCopies(config, learners, folder.copies, self.notice)
        self.learner_changes = False
        """Whether an update, a save or a change of size is under way, or was when the loop broke off: what the ranks hold then
        is not the state of `step`."""
        self.recovering: str | None = None
        """The parts that are being started again, and why; None while the loop runs."""
        self._evaluation_owed = True
        self._empty_steps = 0
        self.samples = GroupSamples(config, pool)
        self.rewards = RewardWatch(recorder, config)
        self._begin_with(selector)
        self.scaler = Scaler(
            config,
            pool=pool,
            learners=learners,
            publisher=publisher,
            notice=self.notice,
            lose=lambda failure: self.assembler.lose_worker(failure),
            hint=hint,
        )

    def _begin_with(self, selector: Selector) -> None:
        """Nothing is in flight."""
        self.selector = selector
        self.ledger = Ledger(self.config.learner.prompts_per_step, self.config.staleness)
        self.assembler = Assembler(
            self.config,
            self.pool,
            selector,
            self.stream,
            self.ledger,
            rewards=self.rewards,
            notice=self.notice,
            stopping=lambda: self.stop_reason is not None,
            on_failure=self._replace_worker,
            on_selected=self._sample_selected,
            on_dropped=self._sample_dropped,
        )
        self.updates = WeightUpdates(
            self.pool,
            self.learners,
            self.publisher,
            self.assembler,
            self.notice,
            max_skipped=self.config.learner.max_skipped,
            newest=lambda: checkpoints.latest(self.folder.checkpoints),
        )

    @property
    def version(self) -> int:
        """The learner's weight version."""
        return self.updates.version

    def stop(self, reason: str) -> None:
        """End after what is being done now; the state is saved."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.notice("stopping", reason)

    async def restore(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimiser, schedule, streams and counts. Raises CheckpointError."""
        state = checkpoints.read_state(path)
        await self.learners.load(path / "learner")
        self._adopt(state)
        self.saver.resumed_from(self.step if path.parent == self.folder.checkpoints else None)
        self._evaluation_owed = self.step == 0
        self.notice("resumed", f"continuing from {path.name}: step {self.step}, weight version {self.version}")

    def begin_again(self, state: RunState, selector: Selector, *, saved: bool) -> None:
        """Go on from `state`, which the learner has, with empty generators that report to `selector`; then call `main`.

        `saved`: it is that of a checkpoint. Steps after it are made again.
        """
        taken_back = state.step < self.step
        self._begin_with(selector)
        self._adopt(state)
        self.saver.resumed_from(self.step if saved else None)
        self.learner_changes = False
        self.samples.clear()
        if taken_back:
            self._evaluation_owed = False

    def _adopt(self, state: RunState) -> None:
        self.stream.restore(state.stream)
        self.ledger.restore(state.ledger)
        # of another dataset the rows have other numbers
        same = self.stream.note is None
        silent, pass_rates = (state.silent, state.pass_rates) if same else ([], [])
        self.assembler.supply.restore(state.given_up, silent, pass_rates, state.revisit)
        self.assembler.restore_attempts(state.attempts)
        if state.rollouts_per_prompt is not None:
            self.balancer.restore(state.rollouts_per_prompt)
        self.assembler.set_group_size(self.balancer.rollouts)
        self.step, self.seconds = state.step, state.seconds
        self.updates.version, self.updates.trained_tokens = state.version, state.trained_tokens

    def state(self) -> RunState:
        """The state from which a run goes on, beside what its learner holds."""
        return RunState(
            step=self.step,
            version=self.version,
            seconds=self.seconds,
            trained_tokens=self.updates.trained_tokens,
            seed=self.config.run.seed,
            # groups in flight are not trained in this state: its stream serves their prompts again
            stream=self.stream.state(self.assembler.prompts_in_flight()),
            ledger=self.ledger.state(),
            attempts=self.assembler.attempts_to_save(),
            given_up=self.assembler.supply.rows_given_up,
            silent=self.assembler.supply.silent_rows,
            revisit=self.assembler.supply.history.chances,
            pass_rates=self.assembler.supply.pass_rates,
            rollouts_per_prompt=self.balancer.rollouts,
        )

    async def _replace_worker(self, failure: Failure) -> None:
        if not self.scaler.wants_replacement(failure):
            return
        if self.pool.serving:  # no step waits for a process that starts
            self.scaler.start_another(failure)
        else:
            await self.updates.replace(failure)

    async def _sample_selected(self, selection: Selection) -> None:
        await self.samples.selected(selection, self.assembler.prompt_of(selection.group), self.step + 1)

    async def _sample_dropped(self, ended: GroupFate) -> None:
        await self.samples.dropped(ended, self.assembler.prompt_of(ended.group), self.step + 1)

    def notice(self, kind: str, text: str, *, level: Level = "info") -> None:
        """Tell people that something happened."""
        self.recorder.event(kind, text, step=self.step, level=level)
