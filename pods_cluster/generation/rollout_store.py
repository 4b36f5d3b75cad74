"""The memory of a worker: which rollouts are still to come, and the finished ones until they are taken or dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from pods_cluster.generation.messages import GeneratorError, GroupRequest
from pods_cluster.types import GroupId, Prompt, Rollout


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    size: int
    pending: set[int]
    wanted: set[int]
    scoring: set[int] = field(default_factory=set)
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class RolloutStore:
    """Rollouts by group; thread-safe. A rollout is pending (in the engine or at the scorers), then stored, then gone.

    `wanted` are the indices that are not given up: a rollout that finishes after it was dropped leaves no trace.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupId, _Group] = {}
        self._changed = threading.Condition()
        self._pending = 0
        self._since = 0.0
        self._occupied = 0.0
        self._scoring = 0
        self._only_scoring = 0.0
        self.stored = 0
        self.stored_tokens = 0

    @property
    def occupied_seconds(self) -> float:
        """Seconds, in all, in which at least one rollout was pending."""
        with self._changed:
            return self._occupied + (time.monotonic() - self._since if self._pending else 0.0)

    @property
    def only_scoring_seconds(self) -> float:
        """Seconds, in all, in which rollouts were pending and every one of them was at the scorers, none in the engine."""
        with self._changed:
            now_too = 0 < self._scoring == self._pending
            return self._only_scoring + (time.monotonic() - self._since if now_too else 0.0)

    def expect(self, requests: Sequence[GroupRequest]) -> None:
        """Open groups, or more indices of open ones. Raises GeneratorError for an index that is there already."""
        with self._changed:
            for request in requests:
                group = self._groups.get(request.group)
                known = group.pending | group.rollouts.keys() if group is not None else set()
                if twice := known.intersection(request.indices):
                    raise GeneratorError(f"group {request.group}: rollouts {sorted(twice)} were submitted here before")
            for request in requests:
                group = self._groups.setdefault(request.group, _Group(request.prompt, request.size, set(), set()))
                group.pending.update(request.indices)
                self._change_pending(len(request.indices))
                group.wanted.update(request.indices)

    def forget(self, requests: Sequence[GroupRequest]) -> None:
        """Undo `expect` for requests that the engine refused."""
        with self._changed:
            for request in requests:
                if (group := self._groups.get(request.group)) is not None:
                    self._change_pending(-len(group.pending.intersection(request.indices)))
                    group.pending.difference_update(request.indices)
                    group.wanted.difference_update(request.indices)
                    self._remove_if_empty(request.group)

    def prompt(self, rollout: Rollout) -> Prompt | None:
        """The prompt of a rollout that is still wanted, else None."""
        with self._changed:
            group = self._groups.get(rollout.group)
            return group.prompt if group is not None and rollout.index in group.wanted else None

    def begin_scoring(self, rollout: Rollout) -> None:
        """A pending rollout has left the engine for the scorers."""
        with self._changed:
            group = self._groups.get(rollout.group)
            if group is not None and rollout.index in group.pending - group.scoring:
                group.scoring.add(rollout.index)
                self._change_pending(0, scoring=1)
                self._changed.notify_all()

    def finish(self, rollout: Rollout) -> int | None:
        """A rollout is no longer pending, and stored if it is wanted: returns its group's size then, else None."""
        with self._changed:
            group = self._groups.get(rollout.group)
            if group is None or rollout.index not in group.pending:
                return None
            group.pending.discard(rollout.index)
            self._change_pending(-1, scoring=-1 if rollout.index in group.scoring else 0)
            group.scoring.discard(rollout.index)
            wanted = rollout.index in group.wanted
            if wanted:
                group.rollouts[rollout.index] = rollout
                self._count_stored(rollout, 1)
            size = group.size
            self._remove_if_empty(rollout.group)
            self._changed.notify_all()
            return size if wanted else None

    def expects(self, group: GroupId) -> bool:
        """Whether rollouts of the group are still pending here."""
        with self._changed:
            entry = self._groups.get(group)
            return entry is not None and bool(entry.pending)

    def take(self, group: GroupId, indices: Sequence[int]) -> tuple[list[Rollout], list[int]]:
        """The stored rollouts among these, which are forgotten here, and the indices that are not stored."""
        with self._changed:
            entry = self._groups.get(group)
            if entry is None:
                return [], list(indices)
            taken = [entry.rollouts[index] for index in indices if index in entry.rollouts]
            missing = [index for index in indices if index not in entry.rollouts]
            for rollout in taken:
                self._release(entry, rollout.index)
            self._remove_if_empty(group)
            self._changed.notify_all()
            return taken, missing

    def keep(self, group: GroupId, indices: Iterable[int]) -> list[str]:
        """Give up all other rollouts of `group`; returns the keys of those that are still pending."""
        with self._changed:
            entry = self._groups.get(group)
            if entry is None:
                return []
            for index in entry.wanted.difference(indices):
                self._release(entry, index)
            given_up = [f"{group}/{index}" for index in entry.pending - entry.wanted]
            self._remove_if_empty(group)
            self._changed.notify_all()
            return given_up

    def drop(self, group: GroupId) -> list[str]:
        """Give up the whole group; returns the keys of rollouts that are still pending."""
        return self.keep(group, ())

    def sample(self, group: GroupId) -> list[Rollout]:
        """Copies of the stored rollouts, by index; they stay."""
        with self._changed:
            entry = self._groups.get(group)
            return [copy(entry.rollouts[index]) for index in sorted(entry.rollouts)] if entry is not None else []

    def finished(self, group: GroupId) -> tuple[int, list[Rollout]]:
        """The size of a group (0: nothing of it is here), and its stored rollouts, which stay."""
        with self._changed:
            entry = self._groups.get(group)
            return (entry.size, list(entry.rollouts.values())) if entry is not None else (0, [])

    def pending_keys(self, group: GroupId, indices: Iterable[int] | None = None) -> list[str]:
        """Keys of rollouts that have not come yet."""
        with self._changed:
            entry = self._groups.get(group)
            if entry is None:
                return []
            wanted = entry.pending if indices is None else entry.pending.intersection(indices)
            return [f"{group}/{index}" for index in wanted]

    def groups(self) -> list[GroupId]:
        """Groups with a wanted rollout, pending or stored."""
        with self._changed:
            return [group for group, entry in self._groups.items() if entry.wanted]

    def wait_empty(self, timeout: float) -> bool:
        """Until every rollout was taken or given up; false when `timeout` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(e.wanted for e in self._groups.values()), timeout)

    def wait_finished(self, timeout: float) -> bool:
        """Until no rollout is pending, wanted or given up; false when `timeout` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def wait_for_room(self, places: int, timeout: float) -> int:
        """Wait until fewer than `places` rollouts are in the engine, or `timeout` passes; how many are."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending - self._scoring < places, timeout)
            return self._pending - self._scoring

    def _release(self, entry: _Group, index: int) -> None:
        entry.wanted.discard(index)
        rollout = entry.rollouts.pop(index, None)
        if rollout is not None:
            self._count_stored(rollout, -1)

    def _change_pending(self, pending: int, scoring: int = 0) -> None:
        now = time.monotonic()
        if self._pending:
            self._occupied += now - self._since
            if self._scoring == self._pending:
                self._only_scoring += now - self._since
        self._pending, self._scoring, self._since = self._pending + pending, self._scoring + scoring, now

    def _count_stored(self, rollout: Rollout, sign: int) -> None:
        self.stored += sign
        self.stored_tokens += sign * len(rollout.token_ids)

    def _remove_if_empty(self, group: GroupId) -> None:
        entry = self._groups.get(group)
        if entry is not None and not entry.pending and not entry.wanted:
            del self._groups[group]
