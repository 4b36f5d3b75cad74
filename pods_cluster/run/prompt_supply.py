"""The supply of prompts to a run: from the stream, less those that end every engine; what was left out is told (pure)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from pods_cluster.data.errors import DataError
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.messages import Failure
from pods_cluster.types import GroupId, Prompt

SUSPECT = 2
"""A prompt that was in this many failed engines in a row is a suspect: it is tried apart from all other suspects."""
ALONE = 3
"""One that was in this many is tried alone."""

Row = tuple[int, int]
"""(epoch, row) of a prompt."""


class PromptSupply:
    """Prompts for the groups of a run, and a record of the engines that failed with them.

    One prompt can end every engine that reads it, as by a fault of a kernel. Its group is lost together with all others
    of its engine, and they come again together. After `SUSPECT` such failures at most one of the suspects is in flight at
    a time, beside other prompts. One whose engine fails then is tried alone, and is the cause when its engine fails again:
    its row is given up for the rest of the run.
    """

    def __init__(self, stream: PromptStream, notice: Callable[..., None]) -> None:
        self.stream = stream
        self._notice = notice
        self._given_up = self._told = 0
        self._rows_given_up: set[int] = set()
        self._deferred = 0
        self._before = self._counts()
        self._deaths: Counter[Row] = Counter()
        self._held: deque[Prompt] = deque()
        self._tried: Row | None = None
        self._rounds = self._productive = 0
        self._issued_in: dict[GroupId, int] = {}

    @property
    def held(self) -> list[Prompt]:
        """Suspects that wait to be tried."""
        return list(self._held)

    @property
    def failures_in_a_row(self) -> int:
        """Rounds of failed engines since a group was finished. Engines that fail with groups which were issued before the
        last failure, as when a node with many of them is gone, belong to its round."""
        return self._rounds - self._productive

    def describe_failures(self, last: Failure) -> str:
        """The failures in a row in a sentence for the error that ends the run."""
        return (
            f"generator.max_failures: generators failed {self.failures_in_a_row} times in a row and finished no group in "
            f"between; the last, {last.worker}: {_first_line(last.cause)}"
        )

    def begin_step(self) -> None:
        """What was not served for the step before is no longer wanted."""
        self._deferred = 0

    def count_from_here(self) -> None:
        """Count `metrics` from here: the stream has been restored."""
        self._before = self._counts()

    def metrics(self) -> dict[str, float]:
        """Passes over the dataset so far; prompts served and left out since the last call."""
        before, self._before = self._before, self._counts()
        return {"epoch": self.stream.epochs} | {name: float(now - before[name]) for name, now in self._before.items()}

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts, at most one of them a suspect; fewer while one is tried alone: see `deferred`.

        Raises DataError, also when every row was given up.
        """
        prompts: list[Prompt] = []
        if self._held and self._tried is None:
            prompt = max(self._held, key=lambda prompt: self._deaths[_row(prompt)])
            self._held.remove(prompt)
            self._tried = _row(prompt)
            prompts.append(prompt)
        if self._one_is_alone:
            self._deferred += count - len(prompts)
            return prompts
        skipped = 0
        while len(prompts) < count:
            for prompt in self.stream.next(count - len(prompts)):
                if prompt.row not in self._rows_given_up:
                    prompts.append(prompt)
                    continue
                self._given_up += 1
                skipped += 1
                if skipped > 2 * len(self._rows_given_up):
                    raise DataError("data.path: every row ended the engines that made its rollouts; see events.jsonl")
        if self.stream.failed > self._told and self.stream.failed >= 10 * self._told:
            self._told = self.stream.failed
            text = f"{self._told} row(s) cannot be rendered and are left out; the newest: {self.stream.failures[-1]}"
            self._notice("prompt_left_out", text, level="warning")
        return prompts

    def deferred(self) -> int:
        """How many prompts were asked for and not served, now that no prompt is tried alone; they count once."""
        if self._one_is_alone:
            return 0
        count, self._deferred = self._deferred, 0
        return count

    def issued(self, group: GroupId) -> None:
        """A group was sent to the engines."""
        self._issued_in[group] = self._rounds

    def finished(self, groups: Iterable[GroupId]) -> None:
        """Engines finished these groups: they make something, and the prompts are harmless."""
        for group in groups:
            self._productive = self._rounds
            self._clear(group)

    def give_back(self, groups: Mapping[GroupId, Prompt]) -> None:
        """Serve the prompts of these unfinished groups again."""
        for group in groups:
            self._clear(group)
        self.stream.give_back(groups.values())

    def give_back_held(self) -> None:
        """Serve the suspects that wait again as any others, when the run goes on."""
        self.stream.give_back(self.held)
        self._held.clear()

    def lost(self, groups: Mapping[GroupId, Prompt], failure: Failure) -> Prompt | None:
        """Serve the prompts of groups whose engine failed again, suspects one after the other. Returns the one that is
        given up as the cause, if any."""
        if any(self._issued_in.get(group) == self._rounds for group in groups):
            self._rounds += 1
        suspects = [prompt for prompt in groups.values() if self._deaths[_row(prompt)] >= ALONE]
        cause = suspects[0] if len(suspects) == 1 else None
        for group, prompt in groups.items():
            deaths = self._deaths[_row(prompt)] + 1
            self._clear(group)
            if prompt is cause:
                continue
            self._deaths[_row(prompt)] = deaths
            if deaths >= SUSPECT:
                self._held.append(prompt)
            else:
                self.stream.give_back([prompt])
        if cause is not None:
            self._given_up += 1
            self._rows_given_up.add(cause.row)
            text = (
                f"row {cause.row} is left out: every engine that made its rollouts failed, {ALONE + 1} in a row; the last, "
                f"{failure.worker}: {_first_line(failure.cause)}"
            )
            self._notice("prompt_given_up", text, level="warning")
        return cause

    @property
    def _one_is_alone(self) -> bool:
        return self._tried is not None and self._deaths[self._tried] >= ALONE

    def _clear(self, group: GroupId) -> None:
        """Count nothing against a prompt that no engine has now."""
        self._issued_in.pop(group, None)
        self._deaths.pop((group.epoch, group.row), None)
        if self._tried == (group.epoch, group.row):
            self._tried = None

    def _counts(self) -> dict[str, int]:
        return {
            "data/prompts_served": self.stream.taken,
            "data/prompts_dropped_overlong": self.stream.dropped,
            "data/prompts_dropped_unrenderable": self.stream.failed,
            "data/prompts_given_up": self._given_up,
        }


def _first_line(cause: str) -> str:
    """A failure's cause without its traceback."""
    return (cause.strip() or "cause unknown").splitlines()[0]


def _row(prompt: Prompt) -> Row:
    return prompt.epoch, prompt.row
