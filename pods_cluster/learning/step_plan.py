"""Plan of a training step: every sequence's weight, rank and micro-batch, fixed before anything is computed.

The loss of a step is a sum over tokens of weight x term. The weights are in the plan, so the sum, and with it the
gradient, is the same however the tokens are spread over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from jaxtyping import Int32

from pods_cluster.config import Config
from pods_cluster.learning.advantage import Scope, advantages
from pods_cluster.learning.microbatches import MicroBatch, PlannedSequence, assign_ranks, fill_microbatches
from pods_cluster.types import GroupId, Locator, Selection

LossKind = Literal["sequence_mean", "token_mean", "dr_grpo"]


class PlanError(ValueError):
    """A step that cannot be planned. The text names the setting, the value and the fix."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings that a plan depends on beside the selections.

    `floor` is the fewest rollouts with which a group is still trained after some were lost. `max_tokens` is the
    denominator of `dr_grpo`. `packed`: micro-batches are packs that hold a group's prompt once (`token_batch`).
    """

    ranks: int
    tokens_per_microbatch: int
    updates_per_batch: int = 1
    loss: LossKind = "sequence_mean"
    max_tokens: int = 1
    scope: Scope = "kept"
    normalize: bool = True
    floor: int = 1
    packed: bool = False


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part: its micro-batches of each optimiser step, as many as every other rank has."""

    updates: tuple[tuple[MicroBatch, ...], ...]

    @property
    def sequences(self) -> list[PlannedSequence]:
        return [sequence for update in self.updates for batch in update for sequence in batch.sequences]

    @property
    def locators(self) -> list[Locator]:
        return [sequence.locator for sequence in self.sequences]

    @property
    def tokens(self) -> int:
        return sum(sequence.total_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of all ranks in one step.

    `groups` are trained; `lost` were given up because too few of their rollouts were left.
    """

    settings: PlanSettings
    ranks: tuple[RankPlan, ...]
    groups: tuple[GroupId, ...]
    lost: tuple[GroupId, ...] = ()
    _selections: tuple[tuple[Selection, ...], ...] = field(default=(), repr=False)
    _rank_of: dict[Locator, int] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> list[PlannedSequence]:
        return [sequence for rank in self.ranks for sequence in rank.sequences]

    def sequences_of(self, updates: Collection[int]) -> list[PlannedSequence]:
        """The sequences of these optimiser steps, 0 being the first."""
        return [
            sequence
            for rank in self.ranks
            for index, update in enumerate(rank.updates)
            if index in updates
            for batch in update
            for sequence in batch.sequences
        ]

    @property
    def trained_rollouts(self) -> int:
        return sum(len(rank.sequences) for rank in self.ranks)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens in the loss."""
        return sum(sequence.trained_tokens for sequence in self.sequences)

    @property
    def largest_microbatch(self) -> int:
        """Computed tokens of the largest forward pass of any rank, with which a rank's peak memory grows."""
        return max(
            (batch.computed_tokens for rank in self.ranks for update in rank.updates for batch in update), default=0
        )

    def without(self, lost: Collection[Locator]) -> StepPlan:
        """The plan without rollouts that could not be fetched.

        Advantages and weights are those of a step that never had these rollouts; a group with fewer than `floor` of
        them left is given up whole. Every other rollout stays on the rank that holds it.
        """
        gone = set(lost)
        given_up = list(self.lost)
        remaining: list[tuple[Selection, ...]] = []
        for update in self._selections:
            kept: list[Selection] = []
            for selection in update:
                index = [i for i, locator in enumerate(selection.locators) if locator not in gone]
                if not index or (len(index) < len(selection) and len(index) < self.settings.floor):
                    given_up.append(selection.group)
                elif len(index) == len(selection):
                    kept.append(selection)
                else:
                    kept.append(_subset(selection, index))
            if kept:
                remaining.append(tuple(kept))
        return _build_plan(remaining, self.settings, tuple(given_up), self._rank_of)


def plan_settings(config: Config, ranks: int | None = None, *, packed: bool = False) -> PlanSettings:
    """Settings of a step's plan from the configuration, with `ranks` in place of `learner.workers`.

    `packed`: whether the ranks take packed micro-batches (`Trainer.packed`).
    """
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
        packed=packed,
    )


def plan_step(selections: Sequence[Selection], settings: PlanSettings) -> StepPlan:
    """Plan one step.

    Whole groups are assigned to `updates_per_batch` optimiser steps (fewer where there are fewer groups), their rollouts
    to ranks with near-equal token counts (`microbatches`). Raises
    PlanError if a rollout is longer than the budget of a micro-batch, or a rollout or group stands twice.
    """
    if settings.ranks < 1 or settings.updates_per_batch < 1 or settings.tokens_per_microbatch < 1:
        raise PlanError(f"ranks, updates_per_batch and tokens_per_microbatch must be at least 1, got {settings}")
    groups = [selection.group for selection in selections]
    if len(set(groups)) < len(groups):
        twice = next(group for group in groups if groups.count(group) > 1)
        raise PlanError(f"group {twice} stands twice in one step")
    _check_sequences(selections, settings.tokens_per_microbatch)
    parts = min(settings.updates_per_batch, len(selections)) or 1
    bounds = [len(selections) * part // parts for part in range(parts + 1)]
    updates = [tuple(selections[start:stop]) for start, stop in pairwise(bounds) if stop > start]
    return _build_plan(updates, settings, (), {})


def _check_sequences(selections: Sequence[Selection], budget: int) -> None:
    for selection in selections:
        if not len(selection):
            raise PlanError(f"group {selection.group} keeps no rollout")
        if len(set(selection.locators)) < len(selection):
            raise PlanError(f"group {selection.group}: a rollout stands twice among the kept")
        if selection.prompt_tokens < 1:
            raise PlanError(
                f"group {selection.group} has an empty prompt; its first token has nothing to be predicted from"
            )
        longest = selection.prompt_tokens + int((selection.lengths + _environment_tokens(selection)).max())
        if longest > budget:
            raise PlanError(
                f"learner.tokens_per_microbatch: {budget} cannot hold a rollout of {longest} tokens "
                f"(group {selection.group}); raise it to {longest} or more, or lower generator.max_tokens"
            )


def _subset(selection: Selection, index: list[int]) -> Selection:
    return replace(
        selection,
        locators=[selection.locators[i] for i in index],
        rewards=selection.rewards[index],
        lengths=selection.lengths[index],
        first_versions=selection.first_versions[index],
        weights=None if selection.weights is None else selection.weights[index],
        environment_tokens=None if selection.environment_tokens is None else selection.environment_tokens[index],
    )


def _build_plan(
    updates: Sequence[tuple[Selection, ...]],
    settings: PlanSettings,
    lost: tuple[GroupId, ...],
    rank_of: dict[Locator, int],
) -> StepPlan:
    rank_of = dict(rank_of)
    rank_updates: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(settings.ranks)]
    for selections in updates:
        sequences = _sequences(selections, settings)
        per_rank = assign_ranks(sequences, settings.ranks, rank_of, packed=settings.packed)
        budget = settings.tokens_per_microbatch
        batches = [fill_microbatches(mine, budget, packed=settings.packed) for mine in per_rank]
        most = max(len(mine) for mine in batches)
        dummy = MicroBatch(packed=settings.packed)
        for rank, mine in enumerate(batches):
            rank_updates[rank].append((*mine, *[dummy] * (most - len(mine))))
    return StepPlan(
        settings=settings,
        ranks=tuple(RankPlan(tuple(updates_of_rank)) for updates_of_rank in rank_updates),
        groups=tuple(selection.group for selections in updates for selection in selections),
        lost=lost,
        _selections=tuple(updates),
        _rank_of=rank_of,
    )


def _environment_tokens(selection: Selection) -> Int32[np.ndarray, " kept"]:
    written = selection.environment_tokens
    return np.zeros(len(selection), np.int32) if written is None else written


def _counted_tokens(selection: Selection) -> int:
    """Sampled tokens of the rollouts that count in the loss."""
    if selection.weights is None:
        return int(selection.lengths.sum())
    return int(selection.lengths[selection.weights > 0].sum())


def _sequences(selections: Sequence[Selection], settings: PlanSettings) -> list[PlannedSequence]:
    all_tokens = sum(_counted_tokens(selection) for selection in selections)
    sequences = []
    for selection in selections:
        values = advantages(
            selection.rewards,
            scope=settings.scope,
            normalize=settings.normalize,
            group_mean=selection.group_mean,
            group_std=selection.group_std,
        )
        equal = 1.0 / (len(selections) * len(selection))
        counts = [1.0] * len(selection) if selection.weights is None else selection.weights.tolist()
        written = _environment_tokens(selection).tolist()
        for locator, advantage, length, count, beside in zip(
            selection.locators, values.tolist(), selection.lengths.tolist(), counts, written, strict=True
        ):
            weight = count * equal
            if settings.loss == "token_mean":
                token_weight = count / max(all_tokens, 1)
            elif settings.loss == "dr_grpo":
                token_weight = weight / settings.max_tokens
            else:
                token_weight = weight / max(length, 1)
            sequences.append(
                PlannedSequence(
                    locator, advantage, weight, token_weight, selection.prompt_tokens, length + beside, beside
                )
            )
    return sequences
