"""The staleness ledger: how many groups may be out, and what became of each (pure).

A group takes a place when it is issued and gives it back exactly once, with its fate. With `prompts_per_step` P and
staleness bound k at most (k + 1) x P places exist, so a group that waits its turn is never older than k versions when
its turn comes: one step is being trained, k more are waiting or being generated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.types import Fate, GroupId


class LedgerError(Exception):
    """A place was taken or given back twice: a fault of the caller, never of the input."""


@dataclass(slots=True)
class Ledger:
    """Places of groups that are out, oldest first, and counts of the fates of those that are not."""

    prompts_per_step: int
    staleness: int
    out: dict[GroupId, int] = field(default_factory=dict)
    """Version that the engines served when the group was issued."""
    fates: Counter[Fate] = field(default_factory=Counter)
    issued: int = 0

    @property
    def capacity(self) -> int:
        return (self.staleness + 1) * self.prompts_per_step

    @property
    def room(self) -> int:
        """Groups that may be issued now."""
        return max(0, self.capacity - len(self.out))

    def issue(self, group: GroupId, version: int) -> None:
        """Take a place for `group` under `version`. Raises LedgerError: no room, or the group is out already."""
        if group in self.out:
            raise LedgerError(f"group {group} is out already")
        if not self.room:
            raise LedgerError(f"group {group}: all {self.capacity} places are taken")
        self.out[group] = version
        self.issued += 1

    def end(self, group: GroupId, fate: Fate) -> None:
        """Give the place of `group` back. Raises LedgerError if it holds none."""
        if self.out.pop(group, None) is None:
            raise LedgerError(f"group {group} holds no place; its fate {fate} would be counted twice")
        self.fates[fate] += 1

    def state(self) -> dict[str, Any]:
        """Counts for a checkpoint. Groups that are out then are given back to the prompt stream by its own state."""
        return {"issued": self.issued, "fates": {fate.value: count for fate, count in self.fates.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.issued = int(state["issued"])
        self.fates = Counter({Fate(name): int(count) for name, count in state["fates"].items()})
