"""The generator worker: a Ray actor with an engine, its scorers, and the memory where finished rollouts stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pods_cluster.config import Config
from pods_cluster.generation.completion_text import CompletionText
from pods_cluster.generation.engine import Engine
from pods_cluster.generation.engine_thread import EngineThread
from pods_cluster.generation.eval_requests import CurrentEvaluation, Evaluation
from pods_cluster.generation.messages import EvalRow, GroupRequest, WorkerFailed, WorkerInfo, WorkerStats
from pods_cluster.generation.node_notice import node_kind, note_sigterm
from pods_cluster.generation.postprocess import Ended, Postprocessor
from pods_cluster.generation.reporter import Reporter, SelectorLink
from pods_cluster.generation.rollout_store import RolloutStore
from pods_cluster.generation.turns import Played, Turns
from pods_cluster.generation.worker_start import start_engine
from pods_cluster.generation.worker_store import StoreCalls
from pods_cluster.generation.worker_weights import WeightCalls
from pods_cluster.scoring.scorer_output import Printed
from pods_cluster.telemetry.process_memory import process_memory
from pods_cluster.types import Prompt, Rollout, RolloutRequest, SamplingParams
from pods_cluster.weights.relay_plan import WorkerLocation

CONCURRENCY = 32
"""Calls that a worker answers at the same time: `disconnect` and `stats` must come through while others wait."""


class GeneratorWorker(StoreCalls, WeightCalls):
    """Serves the RPC methods below from Ray's threads; the engine has one thread of its own.

    The constructor only starts that thread: `ready` waits for it. A worker whose engine, scorers or reports failed
    raises the cause from every call, and names it in `stats().error`.
    """

    def __init__(self, config: Config, name: str, selector: Any = None) -> None:
        self.config = config
        self.name = name
        self._error: str | None = None
        self._told_to_go = note_sigterm()
        self._store = RolloutStore()
        self._evaluations = CurrentEvaluation()
        self._scorers: Any = None
        self._postprocessor: Postprocessor | None = None
        self._turns: Turns | None = None
        self._link = SelectorLink(selector, config.generator.request_timeout)
        self._reporter = Reporter(name, self._link.send, lambda error: self._fail("reporting to the selector", error))
        self._engine = EngineThread(self._start, self._take_finished)

    # Starting and ending.

    def ready(self) -> WorkerInfo:
        """Waits until the engine and the scorers have started. Raises GeneratorError with what kept them from it."""
        engine = self._engine.ready(self.config.generator.start_timeout)
        self._check()
        return WorkerInfo(
            self.name,
            WorkerLocation.current().node,
            os.getpid(),
            self.config.generator.engine,
            engine.version,
            node_kind(),
        )

    def shutdown(self) -> None:
        """End the engine and the scorer processes; finished rollouts are gone then."""
        self._engine.stop()
        self._reporter.close()
        if self._turns is not None:
            self._turns.close()
        if self._scorers is not None:
            self._scorers.close()
        if self._postprocessor is not None:
            self._postprocessor.close()

    def _start(self) -> Engine:
        """Start the engine, in its thread, and what its rollouts go through."""
        started = start_engine(self.config)
        engine, tokenizer, self._scorers = started.engine, started.tokenizer, started.scorers
        generator = self.config.generator
        text = CompletionText(tokenizer, generator.stop_strings, generator.include_stop_str_in_output)
        self._postprocessor = Postprocessor(
            text, self._scorers, self._take_scored, lambda error: self._fail("finishing rollouts", error)
        )
        if self.config.environment is not None:
            self._turns = Turns(
                self.config,
                tokenizer,
                text,
                self._scorers,
                submit=self._submit_turn,
                abort=lambda keys: self._engine.post("abort", lambda engine: engine.abort(keys)),
                done=lambda rollout, played: self._hand_on([(rollout, played)]),
                failed=lambda error: self._fail("playing turns", error),
            )
        return engine

    def wait_for_sigterm(self, timeout: float) -> bool:
        """Whether this process was told to go by SIGTERM, after `timeout` seconds at most. It serves on until it is drained."""
        return self._told_to_go.wait(timeout)

    # Rollouts.

    def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue all or none. Raises EngineError for one that can never run, GeneratorError for a repetition."""
        self._check()
        self._store.expect(groups)
        try:
            self._begin([(request, group.prompt) for group in groups for request in group.requests()])
        except BaseException:
            self._store.forget(groups)
            raise

    def _begin(self, requests: Sequence[tuple[RolloutRequest, Prompt]]) -> int:
        """Queue rollouts; returns the weight version that they begin on."""
        turns, first = self._turns, [request for request, _ in requests]
        if turns is not None:
            first = turns.begin(requests)

        def submit(engine: Engine) -> int:
            engine.submit(first)
            return engine.version

        try:
            return self._call("submit", submit)
        except BaseException:
            if turns is not None:
                turns.forget(first)
            raise

    def _submit_turn(self, request: RolloutRequest) -> None:
        """Queue a rollout's next turn, not waiting for the engine."""

        def submit(engine: Engine) -> None:
            try:
                engine.submit([request])
            except BaseException as error:
                self._fail("a rollout's next turn", error)

        self._engine.post("submit", submit)

    def wait_for_room(self, places: int, timeout: float) -> int:
        """Wait until the engine has fewer than `places` training rollouts, or `timeout` passes; how many it has."""
        self._check()
        return self._store.wait_for_room(places, timeout)

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> list[EvalRow]:
        """`samples` completions of each prompt (0: one greedy), scored, on the weights served now.

        Raises GeneratorError when nothing finishes for `generator.request_timeout` seconds, or the weights change.
        """
        self._check()
        evaluation = Evaluation(prompts, sampling, samples)
        if not evaluation.requests:
            return []
        with self._evaluations.making(evaluation):
            try:
                version = self._begin(evaluation.with_prompts())
                evaluation.wait(self.config.generator.request_timeout, self._check)
                return evaluation.rows(version)
            finally:
                if evaluation.left:
                    self._abort([request.key for request in evaluation.requests])

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Log-probabilities of given completions under the weights served now; see `Engine.score`."""
        self._check()
        return self._call("score", lambda engine: engine.score(sequences, temperature))

    # Health.

    def stats(self) -> WorkerStats:
        """Answers also while the engine hangs or after it failed."""
        engine = self._engine.engine
        mean, longest = self._postprocessor.seconds() if self._postprocessor is not None else (0.0, 0.0)
        return WorkerStats(
            name=self.name,
            version=engine.version if engine is not None else -1,
            closed=engine.closed if engine is not None else True,
            engine=self._engine.stats(),
            groups=len(self._store.groups()),
            stored=self._store.stored,
            stored_tokens=self._store.stored_tokens,
            scoring=self._postprocessor.waiting if self._postprocessor is not None else 0,
            reported=self._reporter.reported,
            scorers=self._scorers.stats() if self._scorers is not None else None,
            scoring_seconds_mean=mean,
            scoring_seconds_max=longest,
            tokens_per_second=self._engine.rate.now,
            saturated=self._engine.rate.saturated,
            stalled_seconds=self._engine.stalled_seconds,
            occupied_seconds=self._store.occupied_seconds,
            error=self._error or self._engine.describe_error(),
            only_scoring_seconds=self._store.only_scoring_seconds,
            seconds=self._engine.seconds(),
            staged=self.staged,
            staging_seconds=self.staging_seconds,
            memory=process_memory(),
            turns=dict(self._turns.counts) if self._turns is not None else {},
        )

    def printed(self, after: int) -> Printed:
        """The lines that rewards printed here after the first `after` lines, as far as it is kept."""
        return self._scorers.printed(after) if self._scorers is not None else Printed(next=after)

    def _check(self) -> None:
        if (error := self._error or self._engine.describe_error()) is not None:
            raise WorkerFailed(error)

    def _fail(self, doing: str, error: BaseException) -> None:
        self._error = self._error or f"{doing} failed: {type(error).__name__}: {error}"

    def _abort(self, keys: list[str]) -> None:
        if keys and self._turns is not None:
            self._turns.abort(keys)
        elif keys:
            self._engine.post("abort", lambda engine: engine.abort(keys))

    def _take_finished(self, rollouts: list[Rollout]) -> None:
        """Take what the engine finished, in its thread."""
        if self._turns is not None:
            self._turns.take(rollouts)
        else:
            self._hand_on([(rollout, None) for rollout in rollouts])

    def _hand_on(self, rollouts: list[tuple[Rollout, Played | None]]) -> None:
        """Have rollouts scored. Those that nobody wants any more end here."""
        postprocessor = self._postprocessor
        assert postprocessor is not None
        wanted: list[Ended] = []
        for rollout, played in rollouts:
            if rollout.group.epoch < 0:
                prompt = self._evaluations.prompt(rollout.group)
            elif (prompt := self._store.prompt(rollout)) is None:
                self._store.finish(rollout)
            if prompt is not None:
                self._store.begin_scoring(rollout)
                wanted.append((rollout, prompt, played))
        if wanted:
            postprocessor.add(wanted)

    def _take_scored(self, rollout: Rollout) -> None:
        if rollout.group.epoch < 0:
            self._evaluations.add(rollout)
            return
        size = self._store.finish(rollout)
        if size is not None:
            # What settles a group has to be known at once where its other rollouts are ended for it.
            more = self.config.selector.settle != "abort" and self._store.expects(rollout.group)
            self._reporter.add(rollout, size, more)
