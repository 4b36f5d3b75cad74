"""Distribution of rollouts over workers by the tokens that they are expected to cost (pure)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

REMEMBERED = 1_000_000
"""Rows whose lengths are remembered; the oldest are forgotten first."""
MEMORY = 0.98
"""What a group leaves of the mean over all rows."""


class ExpectedLengths:
    """Completion tokens a rollout: the row's own mean from an earlier attempt or epoch, else the mean of late."""

    def __init__(self) -> None:
        self._rows: dict[int, float] = {}
        self._mean: float | None = None

    def seen(self, row: int, mean: float) -> None:
        """A group of this row had rollouts of this mean length; NaN (none finished) is passed over."""
        if not math.isfinite(mean):
            return
        self._rows.pop(row, None)
        self._rows[row] = mean
        if len(self._rows) > REMEMBERED:
            del self._rows[next(iter(self._rows))]
        self._mean = mean if self._mean is None else MEMORY * self._mean + (1 - MEMORY) * mean

    def expected(self, row: int) -> float | None:
        """None while nothing is known at all."""
        return self._rows.get(row, self._mean)


def assign(
    pieces: Sequence[tuple[int, float]], loads: Mapping[str, float], *, spread: bool = False
) -> list[dict[str, tuple[int, ...]]]:
    """The places of each piece (rollouts, expected tokens of one): 0 … rollouts - 1 by worker.

    `loads` are the workers' outstanding tokens. Each piece goes whole to the least loaded worker, which with the
    longest pieces first leaves the last worker at most a third later than the best schedule (Graham 1969). With
    `spread` no worker is filled beyond the level at which all would end together; what is left of a piece goes to
    another (McNaughton 1959), so that few pieces are divided, and none ends later than a rollout after that level.
    """
    heap = [(float(load), name) for name, load in loads.items()]
    heapq.heapify(heap)
    level = _level(list(loads.values()), sum(count * tokens for count, tokens in pieces)) if spread else float("inf")
    assigned: list[dict[str, tuple[int, ...]]] = []
    for count, tokens in pieces:
        share: dict[str, tuple[int, ...]] = {}
        start = 0
        while start < count:
            load, name = heapq.heappop(heap)
            fits = (level - load) / tokens if tokens > 0 else float("inf")
            taken = count - start if fits >= count - start else max(1, round(fits))
            share[name] = (*share.get(name, ()), *range(start, start + taken))
            heapq.heappush(heap, (load + taken * tokens, name))
            start += taken
        assigned.append(share)
    return assigned


def _level(loads: list[float], tokens: float) -> float:
    """The common load to which these tokens fill the least loaded workers."""
    loads = sorted(loads)
    level = loads[0] + tokens
    for filled in range(1, len(loads)):
        if level <= loads[filled]:
            break
        level = (sum(loads[: filled + 1]) + tokens) / (filled + 1)
    return level
