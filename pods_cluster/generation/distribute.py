"""Distribution of rollouts over workers by the tokens that they are expected to cost (pure)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

REMEMBERED = 1_000_000
"""Rows whose lengths are remembered; the oldest are forgotten first."""
MEMORY = 0.98
"""Decay of the mean over all rows with each further group."""


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
    pieces: Sequence[tuple[int, float]],
    loads: Mapping[str, float],
    *,
    spread: bool = False,
    rates: Mapping[str, float] | None = None,
) -> list[dict[str, tuple[int, ...]]]:
    """The places of each piece (rollouts, expected tokens of one): 0 … rollouts - 1 by worker.

    `loads` are the workers' outstanding tokens, `rates` their tokens a second against one another (left out: all alike).
    Each piece goes whole to the worker that would end it first, which with the longest pieces first leaves the last of
    equal workers at most a third later than the best schedule (Graham 1969). With `spread` no worker is filled beyond the
    time at which all would end together; what is left of a piece goes to another (McNaughton 1959, at speeds of their own
    Horvath, Lam and Sethi 1977), so that few pieces are divided, and none ends later than a rollout after that time.
    """
    seconds = {name: 1.0 / (rates or {}).get(name, 1.0) for name in loads}  # of a token
    ends = {name: load * seconds[name] for name, load in loads.items()}
    tokens = sum(count * length for count, length in pieces)
    level = _level([(ends[name], 1.0 / seconds[name]) for name in loads], tokens) if spread else float("inf")
    choose = _first_to_end if len(set(seconds.values())) > 1 and not spread else _least_loaded
    heap = [(end, name) for name, end in ends.items()]
    heapq.heapify(heap)
    assigned: list[dict[str, tuple[int, ...]]] = []
    for count, length in pieces:
        share: dict[str, tuple[int, ...]] = {}
        start = 0
        while start < count:
            end, name = choose(heap, seconds, count * length)
            cost = length * seconds[name]
            fits = (level - end) / cost if cost > 0 else float("inf")
            taken = count - start if fits >= count - start else max(1, round(fits))
            share[name] = (*share.get(name, ()), *range(start, start + taken))
            heapq.heappush(heap, (end + taken * cost, name))
            start += taken
        assigned.append(share)
    return assigned


def _least_loaded(
    heap: list[tuple[float, str]],
    seconds: Mapping[str, float],  # noqa: ARG001
    tokens: float,  # noqa: ARG001
) -> tuple[float, str]:
    return heapq.heappop(heap)


def _first_to_end(heap: list[tuple[float, str]], seconds: Mapping[str, float], tokens: float) -> tuple[float, str]:
    """The worker that would have made `tokens` more first; the others stay in the heap."""
    found = min(heap, key=lambda item: (item[0] + tokens * seconds[item[1]], item))
    heap.remove(found)
    heapq.heapify(heap)
    return found


def _level(workers: list[tuple[float, float]], tokens: float) -> float:
    """The time to which these tokens fill the workers, (time of their end, tokens a second) each, that end first."""
    workers = sorted(workers)
    rate, made = 0.0, 0.0  # of the workers below the level, and what they have made up to time 0 of it
    level = float("inf")
    for place, (end, speed) in enumerate(workers):
        rate, made = rate + speed, made + end * speed
        level = (made + tokens) / rate
        if place + 1 == len(workers) or level <= workers[place + 1][0]:
            break
    return level


FLOOR = 1 / 16
"""Least rate of a worker against the fastest: a measurement in an idle moment must not starve it for good."""


def relative_rates(measured: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    """Each worker's rate against the fastest, from (its kind of card, the best tokens a second that it has kept up).

    Workers of one kind share the best rate among them: what a worker was given decides what it shows, and one that was
    given little would be given less. Those of a kind not measured yet count as the mean of the others.
    """
    kinds: dict[str, float] = {}
    for kind, rate in measured.values():
        kinds[kind] = max(kinds.get(kind, 0.0), rate)
    known = [rate for rate in kinds.values() if rate > 0]
    if len(kinds) < 2 or not known:
        return dict.fromkeys(measured, 1.0)
    fastest, mean = max(known), sum(known) / len(known)
    return {name: max((kinds[kind] or mean) / fastest, FLOOR) for name, (kind, _) in measured.items()}
