"""Evaluation on a worker: completions of held-out prompts, made among the training rollouts on one weight version."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pods_cluster.generation.messages import EvalRow, EvalSample, GeneratorError
from pods_cluster.types import FinishReason, GroupId, Prompt, Rollout, RolloutRequest, SamplingParams

POLL_SECONDS = 0.5
TEXT_LIMIT = 8192
"""Characters of a completion that an evaluation brings back."""


class Evaluation:
    """One call of `evaluate`: its requests, and the rows when all completions are in.

    Group ids have negative epochs, which no training group has; they depend on the prompt alone, so that sampled
    completions can be made again.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int) -> None:
        if samples < 0:
            raise GeneratorError(f"evaluate: samples: {samples} must be 0 (one greedy completion) or more")
        if samples == 0:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        count = max(samples, 1)
        self.prompts: dict[GroupId, Prompt] = {}
        for prompt in prompts:
            group = GroupId(-1 - prompt.epoch, prompt.row)
            if group in self.prompts:
                raise GeneratorError(f"evaluate: row {prompt.row} of epoch {prompt.epoch} is given twice")
            self.prompts[group] = prompt
        self.requests = [
            RolloutRequest(group, index, prompt.token_ids, sampling)
            for group, prompt in self.prompts.items()
            for index in range(count)
        ]
        self._count = count
        self._rollouts: dict[GroupId, dict[int, Rollout]] = {group: {} for group in self.prompts}
        self._left = len(self.requests)
        self._changed = threading.Condition()

    def with_prompts(self) -> list[tuple[RolloutRequest, Prompt]]:
        """All requests, each with its prompt."""
        return [(request, self.prompts[request.group]) for request in self.requests]

    def add(self, rollout: Rollout) -> None:
        """A scored completion. (An aborted one is left over from an evaluation that was given up.)"""
        if rollout.finish_reason is FinishReason.ABORT:
            return
        with self._changed:
            self._rollouts[rollout.group][rollout.index] = rollout
            self._left -= 1
            self._changed.notify_all()

    def wait(self, patience: float, check: Callable[[], None]) -> None:
        """Until all are in. Raises GeneratorError when none comes for `patience` seconds, and what `check` raises."""
        left, changed = self._left, time.monotonic()
        while not self._all_in_within(POLL_SECONDS):
            check()
            if self._left != left:
                left, changed = self._left, time.monotonic()
            elif time.monotonic() - changed > patience:
                raise GeneratorError(
                    f"evaluate: {left} of {len(self.requests)} completions are missing and none came for {patience:g} s "
                    "(generator.request_timeout)"
                )

    def _all_in_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, seconds)

    @property
    def left(self) -> int:
        """Completions that are not in yet."""
        return self._left

    def rows(self, version: int) -> list[EvalRow]:
        """The results in the order of the prompts. Raises GeneratorError if the weights changed meanwhile."""
        rows = []
        for group, prompt in self.prompts.items():
            rollouts = [self._rollouts[group][index] for index in range(self._count)]
            seen = {version for rollout in rollouts for version in (rollout.first_version, rollout.last_version)}
            if seen != {version}:
                raise GeneratorError(
                    f"evaluate: weights changed from version {version} to {max(seen)} during the evaluation; "
                    f"publish after it has ended"
                )
            samples = tuple(
                EvalSample(
                    text=rollout.text[:TEXT_LIMIT],
                    reward=rollout.reward,
                    parts=rollout.reward_parts,
                    tokens=rollout.sampled_tokens,
                    truncated=rollout.finish_reason is FinishReason.LENGTH,
                )
                for rollout in rollouts
            )
            rows.append(EvalRow(prompt.epoch, prompt.row, version, samples))
        return rows


class CurrentEvaluation:
    """The evaluation that a worker is making, one at a time; its rollouts are told by their negative epochs."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._now: Evaluation | None = None

    @contextmanager
    def making(self, evaluation: Evaluation) -> Iterator[None]:
        """`evaluation` is the one that takes completions, once the one before it has ended."""
        with self._one:
            self._now = evaluation
            try:
                yield
            finally:
                self._now = None

    def prompt(self, group: GroupId) -> Prompt | None:
        """The prompt of a completion, None where nobody waits for it any more."""
        evaluation = self._now
        return evaluation.prompts.get(group) if evaluation is not None else None

    def add(self, rollout: Rollout) -> None:
        """A scored completion, for whoever still waits for it."""
        evaluation = self._now
        if evaluation is not None and rollout.group in evaluation.prompts:
            evaluation.add(rollout)
