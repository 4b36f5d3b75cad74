"""The last steps of a run as the rules of its health see them (pure)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Record = Mapping[str, float]
WINDOW = 10
"""Steps that a rule looks at."""


@dataclass(slots=True)
class Window:
    """The last steps, and of the whole run what trends are measured against."""

    records: deque[Record] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def add(self, record: Record) -> None:
        self.records.append(record)
        for name, values in (("reward", self.rewards), ("entropy", self.entropies)):
            value = record.get(name)
            if value is not None and math.isfinite(value):
                values.append(float(value))

    def sum(self, name: str) -> float:
        return total(value for record in self.records if math.isfinite(value := record.get(name) or 0.0))

    def mean(self, name: str) -> float:
        """Mean over the steps that have the metric; NaN where none has."""
        values = [float(record[name]) for record in self.records if math.isfinite(record.get(name, math.nan))]
        return total(values) / len(values) if values else math.nan

    def share(self, part: str, whole: str) -> float:
        of = self.sum(whole)
        return self.sum(part) / of if of else math.nan


def total(values: Iterable[float]) -> float:
    """Exact sum; infinity where it is larger than a float."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
