"""Micro-batches as tensors: sequences padded to the longest, or packed into one row.

A pack has no padding, and holds a prompt once for all of its completions. Down-sampling keeps m rollouts of each prompt,
so a step's sequences share their prompts m by m; each completion attends to the one copy, as in Prefix Grouper (arXiv
2506.05433). Causal attention makes that exact: the hidden states of a prompt depend on the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

TokenPair = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and completion ids of one sequence."""


@dataclass(slots=True, eq=False)
class AttentionLayout:
    """Which tokens of a pack attend to which.

    `segments` are lengths that tile the pack; attention is causal inside each. The first `len(prompts)` of them are
    shared prompts. The `sum(answers)` tokens after these attend to a whole shared prompt too: the first `answers[0]` of
    them to the first prompt, the next `answers[1]` to the second, and so on. The `…_starts` are running sums from 0.
    `longest_context` is how many tokens the last token of the longest sequence attends to.
    """

    segments: tuple[int, ...]
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    segment_starts: Int32[Tensor, " segments+1"]
    prompt_starts: Int32[Tensor, " prompts+1"]
    answer_starts: Int32[Tensor, " prompts+1"]
    longest_context: int


@dataclass(slots=True, eq=False)
class TokenBatch:
    """One micro-batch, padded on the right or (with a `layout`) packed into one row.

    The completion tokens of all sequences (with `only`: some of them) lie one after another: `targets` are their ids,
    `rows` the sequence of each, and `positions` the index into the flattened `input_ids` at which each is predicted. A pack
    has `position_ids`: those of a completion go on after its prompt.
    """

    input_ids: Int64[Tensor, "rows length"]
    positions: Int64[Tensor, " tokens"]
    targets: Int64[Tensor, " tokens"]
    rows: Int64[Tensor, " tokens"]
    position_ids: Int64[Tensor, "1 length"] | None = None
    layout: AttentionLayout | None = None

    @property
    def tokens(self) -> int:
        """Completion tokens that are predicted."""
        return len(self.targets)

    def only(self, wanted: Bool[Tensor, " tokens"]) -> TokenBatch:
        """The batch with these of its targets; the others are still read."""
        return replace(self, positions=self.positions[wanted], targets=self.targets[wanted], rows=self.rows[wanted])

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on a device. A GPU copies it while it computes; the host does not wait."""
        if torch.device(device).type == "cpu":
            return self
        wide = [self.input_ids, self.positions, self.targets, self.rows]
        if self.position_ids is not None:
            wide.append(self.position_ids)
        moved = move_together(wide, device)
        layout = self.layout
        if layout is not None:
            starts = move_together([layout.segment_starts, layout.prompt_starts, layout.answer_starts], device)
            layout = replace(layout, segment_starts=starts[0], prompt_starts=starts[1], answer_starts=starts[2])
        input_ids, positions, targets, rows, *more = moved
        return TokenBatch(input_ids, positions, targets, rows, more[0] if more else None, layout)


def pad(sequences: Sequence[TokenPair]) -> TokenBatch:
    """Pad sequences on the right. Without any: one row of one token and no targets, for a dummy pass."""
    if not sequences:
        sequences = [((0,), ())]
    lengths = [len(prompt) + len(completion) for prompt, completion in sequences]
    longest = max(lengths)
    ids = np.zeros((len(sequences), longest), np.int64)
    positions, targets = [], []
    for row, (prompt, completion) in enumerate(sequences):
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : lengths[row]] = completion
        positions.append(row * longest + len(prompt) - 1 + np.arange(len(completion)))
        targets.append(ids[row, len(prompt) : lengths[row]])
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(targets)),
        _rows([len(completion) for _, completion in sequences]),
    )


def pack(sequences: Sequence[TokenPair]) -> TokenBatch:
    """Pack sequences into one row; equal prompts that follow each other are shared.

    The row holds the prompts with several completions, the completions of those prompts in the same order, and the
    sequences that share nothing, each after its prompt. The last token of a completion predicts nothing and is left out.
    Without any sequences: one token and no targets, for a dummy pass.
    """
    groups: list[_Group] = []
    before: Sequence[int] | None = None
    for row, (prompt, completion) in enumerate(sequences):
        if before is None or not (prompt is before or prompt == before):
            groups.append(_Group(np.asarray(prompt, np.int64), {}))
        before = prompt
        groups[-1].completions[row] = np.asarray(completion, np.int64)
    shared = [group for group in groups if group.continued > 1]
    alone = [group for group in groups if group.continued <= 1]
    row = _Row([], [], [], {}, 0)
    ends = []
    for group in shared:
        row.add(group.prompt, 0)
        ends.append(row.end - 1)
    answers = []
    for group, end_of_prompt in zip(shared, ends, strict=True):
        begin = row.end
        for index, completion in group.completions.items():
            own = row.end + np.arange(len(completion) - 1)
            row.positions[index] = np.concatenate([[end_of_prompt], own])[: len(completion)]
            row.add(completion[:-1], len(group.prompt))
        answers.append(row.end - begin)
    for group in alone:
        # At most one completion has more than one token; the others are predicted at the prompt's end alone.
        for index, completion in group.completions.items():
            row.positions[index] = row.end + len(group.prompt) - 1 + np.arange(len(completion))
        longest = max(group.completions.values(), key=len)
        row.add(np.concatenate([group.prompt, longest[:-1]]), 0)
    if not groups:
        row.add(np.zeros(1, np.int64), 0)
    prompts = tuple(len(group.prompt) for group in shared)
    completions = [np.asarray(completion, np.int64) for _, completion in sequences]
    none = [np.zeros(0, np.int64)]
    return TokenBatch(
        torch.from_numpy(np.concatenate(row.ids))[None],
        torch.from_numpy(np.concatenate([row.positions[index] for index in range(len(sequences))] or none)),
        torch.from_numpy(np.concatenate(completions or none)),
        _rows([len(completion) for completion in completions]),
        torch.from_numpy(np.concatenate(row.places))[None],
        AttentionLayout(
            tuple(row.segments),
            prompts,
            tuple(answers),
            _starts(row.segments),
            _starts(prompts),
            _starts(answers),
            1 + max(int(places[-1]) for places in row.places),
        ),
    )


@dataclass(slots=True)
class _Group:
    """One prompt and its completions by their index in the batch."""

    prompt: np.ndarray
    completions: dict[int, np.ndarray]

    @property
    def continued(self) -> int:
        """Completions whose tokens go into the pack: all that are longer than their last token."""
        return sum(len(completion) > 1 for completion in self.completions.values())


@dataclass(slots=True)
class _Row:
    """A pack while it is filled: ids and position ids by segment, and where each sequence's tokens are predicted."""

    ids: list[np.ndarray]
    places: list[np.ndarray]
    segments: list[int]
    positions: dict[int, np.ndarray]
    end: int

    def add(self, ids: np.ndarray, first: int) -> None:
        """Append a segment whose position ids begin at `first`."""
        if len(ids):
            self.ids.append(ids)
            self.places.append(first + np.arange(len(ids)))
            self.segments.append(len(ids))
            self.end += len(ids)


def _rows(lengths: Sequence[int]) -> Int64[Tensor, " tokens"]:
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))


def _starts(lengths: Sequence[int]) -> Int32[Tensor, " lengths+1"]:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def move_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy tensors of one type to a device as one buffer, without waiting for it."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if torch.device(device).type == "cuda":
        flat = flat.pin_memory()  # a copy from pageable memory would make the host wait for the GPU
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
