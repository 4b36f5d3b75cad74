"""The supply of prompts to a run: from the stream, less those that end every engine and those that have taught nothing of
late; what was left out is told (pure)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from pods_cluster.data.errors import DataError
from pods_cluster.data.stream import PromptStream
from pods_cluster.generation.messages import Failure
from pods_cluster.run.prompt_history import PromptHistory
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.types import GroupId, Prompt

SUSPECT = 2
"""A prompt that was in this many failed engines in a row is a suspect: it is tried apart from all other suspects."""
ALONE = 3
"""One that was in this many is tried alone."""
FIRST_FAILURES = 3
"""Rounds of engines that all fail with one cause before any group is finished, on other prompts each time: then it is none
of the prompts."""

Row = tuple[int, int]
"""(epoch, row) of a prompt."""


class PromptSupply:
    """Prompts for the groups of a run, and a record of the engines that failed with them.

    One prompt can end every engine that reads it, as by a fault of a kernel. Its group is lost together with all others
    of its engine, and they come again together. After `SUSPECT` such failures at most one of the suspects is in flight at
    a time, beside other prompts. One whose engine fails then is tried alone, once no other group is with the engines, and is
    the cause when its engine fails again: its row is given up for the rest of the run.

    Engines that raise before any finished a group get one new prompt at a time, so that few starts tell an engine which
    cannot work from a prompt that ends it (`hopeless`).
    """

    def __init__(self, stream: PromptStream, notice: Callable[..., None], history: PromptHistory) -> None:
        self.stream = stream
        self.history = history
        self._notice = notice
        self._given_up = self._told = self._skipped = 0
        self._rows_given_up: set[int] = set()
        self._deferred = 0
        self._before = self._counts()
        self._deaths: Counter[Row] = Counter()
        self._held: deque[Prompt] = deque()
        self._tried: Row | None = None
        self._rounds = self._productive = 0
        self._issued_in: dict[GroupId, int] = {}
        self._ever_finished = False
        self._causes: set[str] = set()

    @property
    def rows_given_up(self) -> list[int]:
        """Rows that are left out, for a checkpoint."""
        return sorted(self._rows_given_up)

    @property
    def silent_rows(self) -> list[list[int]]:
        """Rows whose last groups had no signal, for a checkpoint (`PromptHistory.state`)."""
        return self.history.state()

    @property
    def pass_rates(self) -> list[list[float]]:
        """Past pass rates, for a checkpoint (`Curriculum.state`)."""
        return [] if self.history.curriculum is None else self.history.curriculum.state()

    def restore(
        self,
        given_up: Iterable[int],
        silent: Iterable[Sequence[int]],
        pass_rates: Iterable[Sequence[float]],
        revisit: Sequence[float] = (),
    ) -> None:
        """Go on with what the run knew of its rows before it was resumed."""
        self._rows_given_up = set(given_up)
        self.history.restore(silent, revisit)
        if self.history.curriculum is not None:
            self.history.curriculum.restore(pass_rates)

    def saw(self, group: GroupId, stats: GroupStats, *, signal: bool) -> None:
        """Remember how a group of a row went."""
        self.history.saw(group.epoch, group.row, signal, stats)
        if self.history.curriculum is not None:
            self.history.curriculum.saw(group.epoch, group.row, stats)

    @property
    def held(self) -> list[Prompt]:
        """Suspects that wait to be tried."""
        return list(self._held)

    @property
    def failures_in_a_row(self) -> int:
        """Rounds of failed engines since a group was finished. Engines that fail with groups which were issued before the
        last failure, as when a node with many of them is gone, belong to its round."""
        return self._rounds - self._productive

    @property
    def hopeless(self) -> bool:
        """Whether no engine of the run ever finished a group, and enough of them failed with one cause."""
        return self._probing and len(self._causes) == 1 and self._rounds >= FIRST_FAILURES

    def describe_failures(self, last: Failure) -> str:
        """The failures in a row in a sentence for the error that ends the run."""
        if self.hopeless:
            return (
                f"generator.engine: generators failed {self._rounds} times, each time on other prompts and in the same way, and "
                f"never finished a group; the last, {last.worker}: {_first_line(last.cause)}"
            )
        return (
            f"generator.max_failures: generators failed {self.failures_in_a_row} times in a row and finished no group in "
            f"between; the last, {last.worker}: {_first_line(last.cause)}"
        )

    def begin_step(self) -> None:
        """Forget the prompts that were asked for and not served in the step before."""
        self._deferred = 0

    def count_from_here(self) -> None:
        """Count `metrics` from here: the stream has been restored."""
        self._before = self._counts()

    def metrics(self) -> dict[str, float]:
        """Passes over the dataset so far, prompts served and left out since the last call, and the chances to be tried."""
        before, self._before = self._before, self._counts()
        counts = {name: float(now - before[name]) for name, now in self._before.items()}
        names = ("data/revisit_chance/easy", "data/revisit_chance/hard")
        return {"epoch": self.stream.epochs} | counts | dict(zip(names, self.history.chances, strict=False))

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts, at most one of them a suspect; fewer while one is tried alone, or has to be: see
        `deferred`.

        Raises DataError, also when every row was given up.
        """
        prompts: list[Prompt] = []
        if self._waits_for_others:
            self._deferred += count
            return []
        if self._probing:
            self._deferred += count - 1
            return self._fresh(1)
        if self._held and self._tried is None:
            prompt = self._worst_held
            self._held.remove(prompt)
            self._tried = _row(prompt)
            prompts.append(prompt)
        if self._one_is_alone:
            self._deferred += count - len(prompts)
            return prompts
        return prompts + self._fresh(count - len(prompts))

    def _fresh(self, count: int) -> list[Prompt]:
        """Prompts of the stream, less the rows that were given up or are skipped. Raises DataError."""
        prompts: list[Prompt] = []
        left_out = silent = 0
        while len(prompts) < count:
            for prompt in self.stream.next(count - len(prompts)):
                if prompt.row not in self._rows_given_up:
                    # where a whole epoch would be skipped, its last prompt is not
                    if self.history.skips(prompt.epoch, prompt.row) and silent < len(self.stream):
                        silent += 1
                        self._skipped += 1
                        continue
                    silent = 0
                    prompts.append(prompt)
                    continue
                self._given_up += 1
                left_out += 1
                if left_out > 2 * len(self._rows_given_up):
                    raise DataError("data.path: every row ended the engines that made its rollouts; see events.jsonl")
        if self.stream.failed > self._told and self.stream.failed >= 10 * self._told:
            self._told = self.stream.failed
            text = f"rows that cannot be rendered are left out, {self._told:,} so far; the newest: {self.stream.failures[-1]}"
            self._notice("prompt_left_out", text, level="warning")
        return prompts

    def deferred(self) -> int:
        """Number of prompts that were asked for and not served, now that no prompt is tried alone; each counts once."""
        if self._one_is_alone or self._waits_for_others:
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
            if not self._ever_finished:
                self._ever_finished = True
                harmless = [prompt for prompt in self._held if self._deaths[_row(prompt)] < SUSPECT]
                self._held = deque(prompt for prompt in self._held if prompt not in harmless)
                self.stream.give_back(harmless)

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
            self._causes.add(_first_line(failure.cause) if failure.engine_raised else "")
        suspects = [prompt for prompt in groups.values() if self._deaths[_row(prompt)] >= ALONE]
        # Beside another group it would be no proof.
        cause = suspects[0] if len(suspects) == len(groups) == 1 else None
        for group, prompt in groups.items():
            deaths = self._deaths[_row(prompt)] + 1
            self._clear(group)
            if prompt is cause:
                continue
            self._deaths[_row(prompt)] = deaths
            if deaths >= SUSPECT or self._probing:
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
    def _worst_held(self) -> Prompt:
        return max(self._held, key=lambda prompt: self._deaths[_row(prompt)])

    @property
    def _waits_for_others(self) -> bool:
        """Whether nothing may be served before the engines are empty: for a suspect that has to be alone, or a probe."""
        if not self._issued_in:
            return False
        if self._held and self._tried is None and self._deaths[_row(self._worst_held)] >= ALONE:
            return True
        return self._probing

    @property
    def _probing(self) -> bool:
        """Whether engines get one new prompt at a time, as the first ones of the run failed."""
        return bool(self._causes) and "" not in self._causes and not self._ever_finished

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
            "data/prompts_skipped": self._skipped,
        }


def _first_line(cause: str) -> str:
    """A failure's cause without its traceback."""
    return (cause.strip() or "cause unknown").splitlines()[0]


def _row(prompt: Prompt) -> Row:
    return prompt.epoch, prompt.row
