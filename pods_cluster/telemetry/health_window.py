"""The last steps of a run as the rules of its health see them (pure)."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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


STRETCHES = (WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW)
"""Steps over which the newest are compared with the best: a large fall shows in few, a small one in many."""
CHANCE = 3.0
"""Standard errors that a fall must have beyond what the best of so many stretches has by chance."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A fall of a series: the mean of its best stretch of `steps` steps, and of its last."""

    steps: int
    best: float
    now: float


def fall_of(values: Sequence[float], share: float) -> Fall | None:
    """The fall of the newest steps below the best stretch, by more than `share` of that and than noise explains; None
    without one, or before three stretches are over.

    Noise is measured by the steps' differences, which a trend hardly changes. Of K stretches without a trend the best is some
    sqrt(2 ln K) standard errors above the mean, and the worst as far below: twice that is no fall yet.
    """
    if len(values) < 3 * WINDOW:
        return None
    squares = total((after - before) ** 2 for before, after in itertools.pairwise(values))
    deviation = math.sqrt(squares / (2 * (len(values) - 1)))
    sums = [0.0, *itertools.accumulate(values)]
    last = len(values)
    for steps in STRETCHES:
        if last < 3 * steps:
            break
        now = (sums[last] - sums[last - steps]) / steps
        means = [(sums[end] - sums[end - steps]) / steps for end in range(last - steps, steps - 1, -steps)]
        best = max(means)
        chance = (2 * math.sqrt(2 * math.log(len(means) + 1)) + CHANCE) * deviation / math.sqrt(steps)
        if best - now > max(share * abs(best), chance, 1e-9):
            return Fall(steps, best, now)
    return None


def total(values: Iterable[float]) -> float:
    """Exact sum; infinity where it is larger than a float."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
