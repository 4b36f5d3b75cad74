"""Events and samples by place: what is needed to list them lies in memory, the lines stay on disk."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pods_cluster.telemetry.line_tail import LineTail, clean, parse, read_line

MAX_ENTRIES = 500_000
"""Lines that one file is listed with; the oldest are let go."""


class EventEntry(NamedTuple):
    """An event: its place, and what it is filtered by."""

    offset: int
    length: int
    step: int | None
    kind: str
    level: str


class SampleEntry(NamedTuple):
    """A sampled group: its place, and what the list shows of it."""

    offset: int
    length: int
    step: int
    group: str
    rollouts: int
    kept: int
    mean: float | None
    spread: float | None
    rule: str
    fate: str | None


Entry = TypeVar("Entry", EventEntry, SampleEntry)


class Journal(Generic[Entry]):
    """An append-only file of lines. With `superseded`, a resume marker takes back entries of later steps."""

    def __init__(
        self, path: Path, make: Callable[[int, int, Mapping[str, Any]], Entry | None], *, superseded: bool
    ) -> None:
        self.entries: list[Entry] = []
        self.bad_lines = 0
        self.tail = LineTail(path)
        self._make = make
        self._superseded = superseded

    def advance(self, limit: int) -> list[tuple[Entry, dict[str, Any]]]:
        """Read on; the new entries with their lines."""
        restarts = self.tail.restarts
        try:
            lines = self.tail.poll(limit)
        except OSError:  # unreadable now; asked again at the next poll
            return []
        if self.tail.restarts != restarts:
            self.entries.clear()
        new: list[tuple[Entry, dict[str, Any]]] = []
        for offset, data in lines:
            value = parse(data)
            if value is None:
                self.bad_lines += 1
            elif "marker" in value:
                if self._superseded and value["marker"] == "resumed_from" and isinstance(value.get("step"), int):
                    self.entries = [old for old in self.entries if (old.step or 0) <= value["step"]]
                    new = [(entry, line) for entry, line in new if (entry.step or 0) <= value["step"]]
            else:
                entry = self._make(offset, len(data), value)
                if entry is None:
                    self.bad_lines += 1
                else:
                    self.entries.append(entry)
                    new.append((entry, value))
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[: len(self.entries) - MAX_ENTRIES]
        return new

    def page(
        self, before: int | None, limit: int, keep: Callable[[Entry], bool] = lambda _: True
    ) -> tuple[list[Entry], bool]:
        """Newest first, those before a place in the file; whether there are more."""
        found: list[Entry] = []
        for entry in self._before(before):
            if keep(entry):
                if len(found) == limit:
                    return found, True
                found.append(entry)
        return found, False

    def line(self, entry: Entry) -> dict[str, Any] | None:
        return read_line(self.tail.path, entry.offset, entry.length)

    def at(self, offset: int) -> Entry | None:
        """The entry at a place of the file."""
        low, high = 0, len(self.entries)
        while low < high:
            middle = (low + high) // 2
            if self.entries[middle].offset < offset:
                low = middle + 1
            else:
                high = middle
        return self.entries[low] if low < len(self.entries) and self.entries[low].offset == offset else None

    def _before(self, before: int | None) -> Iterator[Entry]:
        for entry in reversed(self.entries):
            if before is None or entry.offset < before:
                yield entry


def event_entry(offset: int, length: int, value: Mapping[str, Any]) -> EventEntry | None:
    kind, step = value.get("kind"), value.get("step")
    if not isinstance(kind, str):
        return None
    level = value.get("level")
    return EventEntry(
        offset,
        length,
        step if isinstance(step, int) else None,
        sys.intern(clean(kind[:100])),
        level if level in ("warning", "error") else "info",
    )


def sample_entry(offset: int, length: int, value: Mapping[str, Any]) -> SampleEntry | None:
    step, rollouts = value.get("step"), value.get("rollouts")
    if not isinstance(step, int) or not isinstance(rollouts, list):
        return None
    rows = [row for row in rollouts if isinstance(row, dict)]
    rewards = [float(row["reward"]) for row in rows if _finite(row.get("reward"))]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None
    if mean is not None and len(rewards) > 1:
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    fate = value.get("fate")
    return SampleEntry(
        offset,
        length,
        step,
        clean(str(value.get("group", ""))[:200]),
        len(rows),
        sum(row.get("kept") is True for row in rows),
        mean,
        spread,
        sys.intern(clean(str(value.get("rule") or "")[:100])),
        clean(fate) if isinstance(fate, str) else None,
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300
