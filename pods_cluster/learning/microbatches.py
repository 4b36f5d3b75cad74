"""Sequences of an optimiser step dealt to ranks and cut into micro-batches, padded or packed (see `token_batch`)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pods_cluster.types import GroupId, Locator


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One kept rollout in an optimiser step.

    `weight` is 1 / (groups in the optimiser step x kept in its group), so the weights of an optimiser step sum to 1; times
    its own weight where the selection rule gives one (`Selection.weights`).
    `token_weight` is the weight of each of its trained tokens in the loss, by the kind of loss. `completion_tokens` are all
    after the prompt, those of an environment (`environment_tokens`, which are not trained) among them.
    """

    locator: Locator
    advantage: float
    weight: float
    token_weight: float
    prompt_tokens: int
    completion_tokens: int
    environment_tokens: int = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss: those that the model sampled."""
        return self.completion_tokens - self.environment_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward and backward pass: padded to the longest, or packed with a group's prompt once.

    An empty one is a dummy pass that takes part in the collectives.
    """

    sequences: tuple[PlannedSequence, ...] = ()
    packed: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((sequence.total_tokens for sequence in self.sequences), default=0)

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        if not self.packed:
            return self.longest * len(self.sequences)
        count = _PackCount()
        for sequence in self.sequences:
            count.add(sequence)
        return count.tokens


@dataclass(slots=True)
class _PackCount:
    """Tokens of a pack while it grows, and the group whose prompt came last."""

    tokens: int = 0
    group: GroupId | None = None

    def cost(self, sequence: PlannedSequence) -> int:
        """Tokens that the sequence adds: all of its completion but the last, and its prompt if that is new."""
        prompt = 0 if sequence.locator.group == self.group else sequence.prompt_tokens
        return prompt + max(sequence.completion_tokens - 1, 0)

    def add(self, sequence: PlannedSequence) -> None:
        self.tokens += self.cost(sequence)
        self.group = sequence.locator.group


def assign_ranks(
    sequences: Sequence[PlannedSequence], ranks: int, rank_of: dict[Locator, int], *, packed: bool
) -> list[list[PlannedSequence]]:
    """Sequences by rank, with near-equal token counts; those in `rank_of` keep their rank, the others are added to it.

    Padded: the longest first, each to the rank with the fewest tokens. Packed: in the given order (whole groups), cut
    where a rank has its share, so that at most `ranks` - 1 groups are divided and compute their prompt on two ranks.
    """
    if packed:
        _divide(sequences, ranks, rank_of)
        order: Sequence[PlannedSequence] = sequences
    else:
        order = sorted(sequences, key=lambda s: (-s.total_tokens, s.locator))
        heap = [(0, rank) for rank in range(ranks)]
        for sequence in order:
            if sequence.locator not in rank_of:
                tokens, rank = heapq.heappop(heap)
                heapq.heappush(heap, (tokens + sequence.total_tokens, rank))
                rank_of[sequence.locator] = rank
    assigned: list[list[PlannedSequence]] = [[] for _ in range(ranks)]
    for sequence in order:
        assigned[rank_of[sequence.locator]].append(sequence)
    return assigned


def _divide(sequences: Sequence[PlannedSequence], ranks: int, rank_of: dict[Locator, int]) -> None:
    """Add those that have no rank to `rank_of`: each rank in turn takes its share of what is left."""
    new = [sequence for sequence in sequences if sequence.locator not in rank_of]
    start = 0
    for rank in range(ranks):
        left = MicroBatch(tuple(new[start:]), packed=True).computed_tokens
        share, mine = left / (ranks - rank), _PackCount()
        while start < len(new) and (rank == ranks - 1 or mine.tokens + mine.cost(new[start]) / 2 <= share):
            mine.add(new[start])
            rank_of[new[start].locator] = rank
            start += 1


def fill_microbatches(sequences: Sequence[PlannedSequence], budget: int, *, packed: bool) -> list[MicroBatch]:
    """Cut a rank's sequences, in the order of `assign_ranks`, into micro-batches of at most `budget` computed tokens."""
    if packed:
        return [MicroBatch(tuple(pack), packed=True) for pack in _packs(sequences, budget)]
    batches, start = [], 0
    while start < len(sequences):
        rows = max(budget // sequences[start].total_tokens, 1)
        batches.append(MicroBatch(tuple(sequences[start : start + rows])))
        start += rows
    return batches


def _packs(sequences: Sequence[PlannedSequence], budget: int) -> list[list[PlannedSequence]]:
    """Packs, as few as filling one after the other gives, of near-equal size where that takes no more of them."""
    full = _fill(sequences, budget, 1)
    even = _fill(sequences, budget, len(full))
    return even if len(even) <= len(full) else full


def _fill(sequences: Sequence[PlannedSequence], budget: int, shares: int) -> list[list[PlannedSequence]]:
    """Packs of at most `budget` tokens; the first `shares` - 1 take an equal share of what is left, the others all."""
    packs: list[list[PlannedSequence]] = []
    start = 0
    while start < len(sequences):
        shared = len(packs) < shares - 1
        left = MicroBatch(tuple(sequences[start:]), packed=True).computed_tokens if shared else 0
        share = left / (shares - len(packs)) if shared else budget
        count, first = _PackCount(), start
        while start < len(sequences):
            cost = count.cost(sequences[start])
            if start > first and (count.tokens + cost > budget or (shared and count.tokens + cost / 2 > share)):
                break
            count.add(sequences[start])
            start += 1
        packs.append(list(sequences[first:start]))
    return packs
