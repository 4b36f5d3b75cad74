"""The groups in flight, each with its prompt and size, and how often each row of the dataset was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pods_cluster.run.staleness_ledger import Ledger
from pods_cluster.types import Fate, GroupId, Prompt


class IssuedGroups:
    """Every group that holds a slot of the ledger, oldest first.

    A group is an attempt at a row: its number names the random streams of its rollouts. What is given up before its time
    (`Fate.CANCELLED`) comes again as the same attempt, what was lost as the next one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._prompts: dict[GroupId, Prompt] = {}
        self._sizes: dict[GroupId, int] = {}
        self._order: dict[GroupId, int] = {}
        self._attempts: Counter[tuple[int, int]] = Counter()

    def __contains__(self, group: GroupId) -> bool:
        return group in self._prompts

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self._prompts)

    def prompt(self, group: GroupId) -> Prompt:
        """The prompt of a group in flight."""
        return self._prompts[group]

    def prompts(self) -> list[Prompt]:
        """Prompts of all groups, oldest first."""
        return list(self._prompts.values())

    def size(self, group: GroupId) -> int:
        """Number of rollouts that the group is to have (n)."""
        return self._sizes[group]

    def place(self, group: GroupId) -> int:
        """The group's place in the order of issue over the run."""
        return self._order[group]

    def begin(self, prompt: Prompt, size: int, version: int) -> GroupId:
        """Take a slot for the next attempt at a prompt's row, with `size` rollouts, issued at weight `version`."""
        row = (prompt.epoch, prompt.row)
        group = GroupId(*row, self._attempts[row])
        self._attempts[row] += 1
        self.ledger.issue(group, version)
        self._prompts[group], self._sizes[group], self._order[group] = prompt, size, self.ledger.issued
        return group

    def end(self, group: GroupId, fate: Fate) -> None:
        """Give a group's slot back."""
        self.ledger.end(group, fate)
        prompt = self._prompts.pop(group)
        del self._sizes[group], self._order[group]
        if fate is Fate.CANCELLED:
            # given up before its time: the same attempt, with the same random streams, when the run goes on
            self._attempts[prompt.epoch, prompt.row] -= 1
        elif fate is not Fate.LOST:
            # the row will not be tried again this epoch; forget its attempts so that the table stays small
            self.forget(prompt)

    def forget(self, prompt: Prompt) -> None:
        """The row will not be tried again this epoch."""
        self._attempts.pop((prompt.epoch, prompt.row), None)

    def undo_end(self, group: GroupId, fate: Fate) -> None:
        """A group that ended so is to be tried again as the same attempt."""
        self.ledger.cancel_ended(fate)
        self._attempts[group.epoch, group.row] = group.attempt

    def attempts_to_save(self) -> list[list[int]]:
        """[epoch, row, count] of each row that was tried, for a checkpoint; groups in flight count as not tried."""
        tried = Counter(self._attempts)
        tried.subtract((prompt.epoch, prompt.row) for prompt in self._prompts.values())
        return [[epoch, row, count] for (epoch, row), count in tried.items() if count > 0]

    def restore_attempts(self, attempts: Iterable[Sequence[int]]) -> None:
        """Go on with the attempts of a checkpoint."""
        for epoch, row, count in attempts:
            self._attempts[epoch, row] = count
