"""The staleness ledger: a bound on the groups in flight, and the fate of each group (pure).

A group takes a slot when it is issued and gives it back exactly once, with its fate. With `prompts_per_step` P and
staleness bound k there are (k + 1) x P slots, so a group is never older than k versions when it is trained: one step is
being trained, k more are waiting or being generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.types import Fate, GroupId


class LedgerError(Exception):
    """A slot was taken or given back twice: a fault of the caller, never of the input."""


@dataclass(slots=True)
class Ledger:
    """Slots of the groups in flight, oldest first, and counts of the fates of all others."""

    prompts_per_step: int
    staleness: int
    in_flight: dict[GroupId, int] = field(default_factory=dict)
    """Groups that hold a slot, and the weight version that the engines served when each was issued."""
    fates: Counter[Fate] = field(default_factory=Counter)
    issued: int = 0

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return (self.staleness + 1) * self.prompts_per_step

    @property
    def free(self) -> int:
        """Slots that groups may be issued into now."""
        return max(0, self.capacity - len(self.in_flight))

    def issue(self, group: GroupId, version: int) -> None:
        """Take a slot for `group` under `version`. Raises LedgerError: none is free, or the group has one."""
        if group in self.in_flight:
            raise LedgerError(f"group {group} is in flight already")
        if not self.free:
            raise LedgerError(f"group {group}: all {self.capacity} slots are taken")
        self.in_flight[group] = version
        self.issued += 1

    def end(self, group: GroupId, fate: Fate) -> None:
        """Give the slot of `group` back. Raises LedgerError if it holds none."""
        if self.in_flight.pop(group, None) is None:
            raise LedgerError(f"group {group} holds no slot; its fate {fate} would be counted twice")
        self.fates[fate] += 1

    def cancel_ended(self, fate: Fate) -> None:
        """Count a group that ended with `fate` as cancelled: the step that it ended in is not made."""
        self.fates[fate] -= 1
        self.fates[Fate.CANCELLED] += 1

    def state(self) -> dict[str, Any]:
        """The counts for a checkpoint. Prompts of groups in flight return to the stream by the stream's own state."""
        return {"issued": self.issued, "fates": {fate.value: count for fate, count in self.fates.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the counts of a checkpoint."""
        self.issued = int(state["issued"])
        self.fates = Counter({Fate(name): int(count) for name, count in state["fates"].items()})
