"""The selector's core: it assembles groups from shards, evaluates complete ones, and decides what a step trains on.

Pure: no ray, no clock. Every expected group gets exactly one fate, reported exactly once: as a selection or a fate of
a `Decision`, or by `cancel`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.group_shard import GroupShard
from pods_cluster.selection.decision_packing import pack_selections, pack_stats, unpack_selections, unpack_stats
from pods_cluster.selection.group_assembler import GroupAssembler, GroupEvaluation
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.selection.policy import SelectionPolicy
from pods_cluster.selection.stopping import Instructions, RemainingLengths, Wave
from pods_cluster.selection.variance_budget import allocate
from pods_cluster.types import Fate, GroupId, Selection

MAX_FATES = 4096
"""Most fates in one decision; further ones follow in the next."""
REMEMBERED_GROUPS = 65536
"""Finished groups that are remembered, so that a second announcement of one is refused."""


@dataclass(slots=True)
class GroupFate:
    """The fate of a group that is not trained on, with its statistics."""

    group: GroupId
    fate: Fate
    stats: GroupStats


@dataclass(slots=True)
class Decision:
    """The answer to one poll: `selections`, oldest group first, with parallel `stats`, and `fates` of other groups.

    The selector holds `ready` more trainable groups and waits for `incomplete` ones; `overtaken` of both are older than
    the youngest group in `selections`. `more_fates` did not fit into this decision. `timed_out`: the time of the poll
    ended. `superseded`: a later poll has taken over, and this one brings nothing. The poll waited for `waited` seconds,
    in which the selector computed for `select_seconds`. `resident_bytes` is the memory of the selector's process.
    """

    selections: list[Selection] = field(default_factory=list)
    stats: list[GroupStats] = field(default_factory=list)
    fates: list[GroupFate] = field(default_factory=list)
    ready: int = 0
    incomplete: int = 0
    overtaken: int = 0
    more_fates: int = 0
    timed_out: bool = False
    superseded: bool = False
    waited: float = 0.0
    select_seconds: float = 0.0
    resident_bytes: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        fates = [(tuple(fate.group), fate.fate.value, pack_stats(fate.stats)) for fate in self.fates]
        stats = [pack_stats(stats) for stats in self.stats]
        counts = (self.ready, self.incomplete, self.overtaken, self.more_fates)
        rest = (*counts, self.timed_out, self.superseded, self.waited, self.select_seconds, self.resident_bytes)
        return _unpack, (pack_selections(self.selections), stats, fates, rest)


def _unpack(selections: tuple[Any, ...], stats: list[Any], fates: list[Any], rest: tuple[Any, ...]) -> Decision:
    return Decision(
        unpack_selections(selections),
        [unpack_stats(values) for values in stats],
        [GroupFate(GroupId(*group), Fate(fate), unpack_stats(values)) for group, fate, values in fates],
        *rest,
    )


class SelectorCore:
    """Holds the groups between generation and learning, and selects among their rollouts by `policy`."""

    def __init__(self, policy: SelectionPolicy) -> None:
        self.policy = policy
        self.fate_counts: Counter[Fate] = Counter()
        self.ignored: Counter[str] = Counter()
        self._groups: dict[GroupId, GroupAssembler] = {}
        self._position: dict[GroupId, int] = {}  # in the order of issue
        self._unevaluated: dict[GroupId, None] = {}
        self._trainable: dict[GroupId, GroupEvaluation] = {}
        self._fates: deque[GroupFate] = deque()
        self._past: dict[GroupId, None] = {}
        self._instructions = Instructions()
        self._remaining_lengths = RemainingLengths()
        self._evaluated_at: tuple[int, int] | None = None  # learner version and staleness of the last evaluations
        self._issued = 0

    def expect(self, group: GroupId, size: int, order: int | None = None) -> int:
        """Announce a group of `size` rollouts before any of it is generated; shards of other groups are ignored.

        Returns how many of its rollouts to issue now, from index 0 on; `instructions` asks for the rest. `order` is the
        group's position in the order of issue (default: that of the calls). Raises ValueError for a size below 1, or a
        group that is expected already or has had its fate (another attempt at a row has its own group id).
        """
        group = GroupId(*group)
        if size < 1:
            raise ValueError(f"size: {size} rollouts of group {group}; a group has at least 1")
        if group in self._groups or group in self._past:
            state = "is expected already" if group in self._groups else "has had its fate"
            raise ValueError(f"group: {group} {state}; issue the row again under its next attempt number")
        self._issued = max(self._issued, self._issued if order is None else order) + 1
        settling = self.policy.settling
        first = size if settling is None else settling.first_wave(size)
        self._groups[group] = GroupAssembler(group, size, first)
        self._position[group] = self._issued - 1 if order is None else order
        return first

    def add(self, shard: GroupShard) -> None:
        """Add a shard. Rollouts that are here already, and shards of groups that are not expected, are only counted.

        Raises ShardError for a shard that contradicts itself or its group, ValueError for a reward outside the declared
        range where groups are stopped early.
        """
        held = self._groups.get(shard.group)
        if held is None:
            self.ignored["unknown_group_rollouts"] += len(shard.indices) + shard.lost
            return
        ignored = held.add(shard)
        if ignored:
            self.ignored["duplicate_rollouts"] += ignored
        self._advance(held)

    def mark_lost(self, worker: str) -> int:
        """Mark every finished rollout that a dead worker held as lost, and return how many they are.

        Rollouts of groups that have had their fate do not count. Those that the worker had not reported are reported by
        the pool, as `lost` of a shard.
        """
        lost = 0
        for held in self._groups.values():
            gone = held.mark_lost(worker)
            if gone:
                self._advance(held)
            lost += gone
        return lost

    def cancel(self, groups: Iterable[GroupId]) -> list[GroupFate]:
        """Give up groups, and return those that had no fate yet; later shards of them are ignored."""
        cancelled = []
        for group in groups:
            held = self._groups.get(group)
            if held is not None:
                cancelled.append(GroupFate(held.group, Fate.CANCELLED, held.stats()))
                self._finish(held.group, Fate.CANCELLED)
        return cancelled

    def instructions(self) -> Instructions:
        """Return what the generators are to do, since the last call."""
        instructions, self._instructions = self._instructions, Instructions()
        instructions.waves = [wave for wave in instructions.waves if wave.group in self._groups]
        instructions.abort = [
            group for group in instructions.abort if group in self._groups and not self._groups[group].complete
        ]
        return instructions

    @property
    def has_instructions(self) -> bool:
        """Whether there is something for the generators to do."""
        return bool(self._instructions)

    def ready(self, learner_version: int, staleness: int) -> tuple[int, int]:
        """Evaluate what is new; return how many groups are trainable at this version, and how many fates wait.

        Raises RuleError when the rule fails on a group; the group stays, and the next call raises again.
        """
        if self._evaluated_at != (learner_version, staleness):
            self._evaluated_at = (learner_version, staleness)
            oldest = learner_version - staleness
            for group, evaluation in list(self._trainable.items()):
                if evaluation.stats.n_stale or evaluation.stats.oldest_version < oldest:
                    self._evaluate_again(group)
        while self._unevaluated:
            group = next(iter(self._unevaluated))
            held = self._groups[group]
            evaluation = held.evaluate(self.policy, learner_version, staleness)
            del self._unevaluated[group]
            if self.policy.settling is not None:
                self._estimate_saved(held, evaluation)
            if evaluation.selection is None:
                self._fates.append(GroupFate(group, evaluation.fate, evaluation.stats))
                self._finish(group, evaluation.fate)
            else:
                self._trainable[group] = evaluation
        return len(self._trainable), len(self._fates)

    def oldest_ready(self, want: int) -> int:
        """Return how many of the `want` oldest groups without a fate were trainable at the last `ready`."""
        return len(self._oldest_trainable(want))

    def collect(
        self, want: int, learner_version: int, staleness: int, *, partial: bool = True, oldest_only: bool = False
    ) -> Decision:
        """Assemble a step: at most `want` selections, oldest group first, and the fates that are known.

        A rollout is trained on only if learner_version - its first version <= staleness; a group's selection is made
        among those. `partial=False` returns all `want` selections or none; `oldest_only` takes only from the `want`
        oldest groups, so that a group of long rollouts is not overtaken. A group in `selections` has left the selector.
        Raises RuleError as `ready` does.
        """
        self.ready(learner_version, staleness)
        if oldest_only:
            chosen = self._oldest_trainable(want)
        else:
            chosen = sorted(self._trainable, key=self._position.__getitem__)[:want]
        if len(chosen) < want and not partial:
            chosen = []
        decision = Decision()
        if chosen:
            youngest = max(self._position[group] for group in chosen)
            older = sum(map(youngest.__gt__, self._position.values()))
            decision.overtaken = older - (len(chosen) - 1)
        if self.policy.config.budget == "step":
            self._spread_budget(chosen, learner_version, staleness)
        for group in chosen:
            evaluation = self._trainable[group]
            assert evaluation.selection is not None
            decision.selections.append(evaluation.selection)
            decision.stats.append(evaluation.stats)
            self._finish(group, Fate.TRAINED)
        while self._fates and len(decision.fates) < MAX_FATES:
            decision.fates.append(self._fates.popleft())
        decision.ready, decision.more_fates = len(self._trainable), len(self._fates)
        decision.incomplete = len(self._groups) - decision.ready
        return decision

    def _spread_budget(self, chosen: list[GroupId], learner_version: int, staleness: int) -> None:
        """Select again in groups that keep more or fewer than m, as their spreads ask for."""
        found = [selection for group in chosen if (selection := self._trainable[group].selection) is not None]
        keep = self.policy.config.keep
        counts = allocate([each.group_std for each in found], [each.group_valid for each in found], keep * len(found))
        for group, count in zip(chosen, counts.tolist(), strict=True):
            if count != keep:
                again = self._groups[group].evaluate(self.policy, learner_version, staleness, keep=count)
                if again.selection is not None:  # fewer may be without a signal: then the group keeps its m
                    self._trainable[group] = again

    def expected(self) -> list[GroupId]:
        """Return the groups without a fate, in the order of issue."""
        return sorted(self._groups, key=self._position.__getitem__)

    def _oldest_trainable(self, want: int) -> list[GroupId]:
        return [group for group in self.expected()[:want] if group in self._trainable]

    def _estimate_saved(self, held: GroupAssembler, evaluation: GroupEvaluation) -> None:
        """Record the lengths of a group that ended by itself; estimate the tokens saved in one that was aborted."""
        lengths = held.lengths[held.holder >= 0]
        if not held.settled:
            self._remaining_lengths.record(lengths)
        elif evaluation.stats.n_aborted:
            saved = self._remaining_lengths.expected_tokens(lengths[held.aborted[held.holder >= 0]])
            if saved is not None:
                evaluation.stats.tokens_saved = saved

    def _advance(self, held: GroupAssembler) -> None:
        """After a change of a group: stop it, ask for its next wave, or evaluate it if it is complete."""
        settling = self.policy.settling
        if settling is not None and not held.settled:
            if settling.config.settle == "abort":
                if not held.complete and settling.is_settled(held.usable_rewards(self._oldest)):
                    held.settled = True
                    self._instructions.abort.append(held.group)
            elif held.complete and held.issued < held.size:
                count = settling.next_wave(held.size, held.issued, held.usable_rewards(self._oldest))
                held.settled = count == 0
                if count:
                    self._trainable.pop(held.group, None)
                    length = held.stats().length_mean
                    self._instructions.waves.append(Wave(held.group, held.issued, held.issued + count, length))
                    held.issued += count
        if held.complete:
            self._evaluate_again(held.group)

    @property
    def _oldest(self) -> int | None:
        """The oldest weight version that could be trained at the last evaluation; None before the first."""
        return None if self._evaluated_at is None else self._evaluated_at[0] - self._evaluated_at[1]

    def _evaluate_again(self, group: GroupId) -> None:
        self._trainable.pop(group, None)
        self._unevaluated[group] = None

    def _finish(self, group: GroupId, fate: Fate) -> None:
        del self._groups[group], self._position[group]
        self._trainable.pop(group, None)
        self._unevaluated.pop(group, None)
        self._past[group] = None
        if len(self._past) > REMEMBERED_GROUPS:
            del self._past[next(iter(self._past))]
        self.fate_counts[fate] += 1
