"""Which worker makes which rollouts (pure)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def assign(
    pieces: Sequence[tuple[int, float]], loads: Mapping[str, float], *, spread: bool = False
) -> list[dict[str, tuple[int, ...]]]:
    """For each piece (rollouts, expected tokens of one) its places 0 … rollouts - 1 by worker.

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
