"""Reports of the learner: what its ranks and the group as a whole answer. Importable without torch or Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pods_cluster.learning.microbatches import MicroBatch
from pods_cluster.learning.step_metrics import TokenStats
from pods_cluster.telemetry.process_memory import ProcessMemory
from pods_cluster.types import GroupId, Locator


class LearnerError(Exception):
    """A rank failed, died or hung. The group is broken then: close it and start another."""


class ResizeError(LearnerError):
    """The group could not get another size; it works on with the one that it had."""


class StorageError(Exception):
    """The disk did not take what the group wrote (full, over its quota, read-only, …); the group works on."""


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's answer after it wrote to disk: why the disk did not take it (None: it did), and notes for people."""

    fault: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MissingRollout:
    """A selected rollout that did not reach the learner rank that should train it, and why."""

    locator: Locator
    cause: str


@dataclass(frozen=True, slots=True)
class LostGroup:
    """A group that was selected but not trained: of its `kept` rollouts, `missing` did not reach the learner.

    `cause` is the most frequent one among the missing rollouts.
    """

    group: GroupId
    kept: int
    missing: int
    cause: str

    def __str__(self) -> str:
        return f"group {self.group}: {self.missing} of {self.kept} kept rollouts are missing ({self.cause})"


def lost_groups(
    groups: Sequence[GroupId], kept: Mapping[GroupId, int], missing: Sequence[MissingRollout]
) -> list[LostGroup]:
    """The lost `groups` with their causes, given how many rollouts each kept and all missing rollouts of the step."""
    causes: dict[GroupId, Counter[str]] = {group: Counter() for group in groups}
    for rollout in missing:
        if rollout.locator.group in causes:
            causes[rollout.locator.group][rollout.cause] += 1
    return [
        LostGroup(group, kept[group], counts.total(), counts.most_common(1)[0][0] if counts else "cause unknown")
        for group, counts in causes.items()
    ]


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """An optimiser step that no rank took, because its loss or its gradient was not finite.

    `update` counts the updates of the step from 0. `groups` are those whose loss was not finite; empty where it was the
    gradient alone. `overflow`: the weights are float16 and the loss was finite, so that its scale was too high; the next
    update is tried with half of it.
    """

    update: int
    groups: tuple[GroupId, ...] = ()
    overflow: bool = False

    @property
    def cause(self) -> str:
        if self.groups:
            named = ", ".join(map(str, self.groups[:GROUPS_NAMED]))
            more = f" and {len(self.groups) - GROUPS_NAMED} more" if len(self.groups) > GROUPS_NAMED else ""
            return f"the loss of group {named}{more} is not finite"
        return "the gradient overflows in float16" if self.overflow else "the gradient is not finite"


GROUPS_NAMED = 3
"""Groups that the cause of a skipped update names; the others are counted."""


def merge_skipped(results: Sequence[RankResult], *, float16: bool = False) -> list[SkippedUpdate]:
    """The updates that were skipped, as all ranks together saw them."""
    skipped: dict[int, list[GroupId]] = {}
    for result in results:
        for skip in result.skipped:
            skipped.setdefault(skip.update, []).extend(skip.groups)
    return [
        SkippedUpdate(update, tuple(dict.fromkeys(groups)), float16 and not groups)
        for update, groups in sorted(skipped.items())
    ]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one training step of the learner group.

    `trained` and `lost` groups together are those of the selections. `missing` holds every rollout that did not
    arrive, also of groups that were trained without it; `lost_rollouts` counts these and the rest of the lost groups.
    `updates` are those that were applied, `skipped` those that were not; rollouts and tokens are counted in applied ones.
    `trained_tokens` are completion tokens in the loss, `total_tokens` count prompts too. `metrics` are for the record,
    by the names of the metric registry. `fetch_seconds` is the time until all ranks had their rollouts,
    `update_seconds` that of all forward and backward passes and optimiser steps, and `busy_seconds` what the slowest
    rank needed of the latter. `memory` is the largest of the ranks'.
    """

    metrics: Mapping[str, float]
    trained: list[GroupId]
    lost: list[LostGroup]
    trained_rollouts: int
    lost_rollouts: int
    trained_tokens: int
    total_tokens: int
    received_bytes: int
    updates: int
    fetch_seconds: float
    update_seconds: float
    busy_seconds: float = 0.0
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    missing: list[MissingRollout] = field(default_factory=list)
    skipped: list[SkippedUpdate] = field(default_factory=list)


@dataclass(slots=True)
class CopyReport:
    """State of a light copy of a rank: whether it is `written`, or why there will be none (`fault`); it kept the
    rank for `seconds`."""

    written: bool = False
    fault: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class FetchReport:
    """Outcome of one rank's request for its rollouts; `received_bytes` is the size of their numbers as they were sent."""

    received: int = 0
    missing: list[MissingRollout] = field(default_factory=list)
    received_bytes: int = 0
    seconds: float = 0.0

    def add_missing(self, locators: Sequence[Locator], cause: str) -> None:
        self.missing.extend(MissingRollout(locator, cause) for locator in locators)


@dataclass(slots=True)
class RankResult:
    """Result of one rank's part of a step: statistics over its tokens, and its gradient norms (equal on every rank).

    Both are of applied updates alone; `skipped` are the others, with the groups of this rank whose loss was not finite.

    `computed_tokens` went through the model, `padded_tokens` of them as padding. `sequence_tokens` is the length of all
    sequences together, prompts counted for each; it is larger than the others where prompts are shared. `memory`
    is that of the rank's process after the step.
    """

    stats: TokenStats = field(default_factory=TokenStats)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    microbatches: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    sequence_tokens: int = 0
    largest_microbatch: int = 0
    seconds: float = 0.0
    memory: ProcessMemory = field(default_factory=ProcessMemory)
    skipped: list[SkippedUpdate] = field(default_factory=list)

    def count(self, microbatch: MicroBatch) -> None:
        """Add a micro-batch to the counts."""
        computed = microbatch.computed_tokens
        length = sum(sequence.total_tokens for sequence in microbatch.sequences)
        self.microbatches += 1
        self.computed_tokens += computed
        self.padded_tokens += 0 if microbatch.packed else computed - length
        self.sequence_tokens += length
        self.largest_microbatch = max(self.largest_microbatch, computed)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Identity of a started rank: its process, its device and its model.

    `node` is the host's name, `node_id` Ray's. `parameters` and `trainable` count elements; `chunked_head` says that
    logits are made chunk by chunk (`log_probs`). `kernels` are those of the decoder, `packed` says that it takes packed
    micro-batches, and `choices` how it came to that, a sentence each.
    """

    rank: int
    node: str
    node_id: str
    pid: int
    device: str
    parameters: int
    trainable: int
    chunked_head: bool
    kernels: str = "plain"
    packed: bool = False
    choices: tuple[str, ...] = ()
    rendezvous_seconds: float = 0.0
    model_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a rank in bytes.

    `peak` is that of the process (of the GPU where there is one), `optimizer` the optimiser states with float32 master
    weights.
    """

    peak: int
    optimizer: int
