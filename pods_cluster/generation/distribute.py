"""Which worker makes which rollouts (pure)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def assign(
    tokens: Sequence[int], size: int, loads: Mapping[str, int], *, spread: bool = False
) -> list[dict[str, tuple[int, ...]]]:
    """For each group (at most `tokens[i]` tokens to make) the rollout indices by worker, least loaded worker first.

    `loads` are the workers' outstanding tokens. A group stays whole; with `spread` and fewer groups than workers each
    group is divided over several workers in near-equal runs of indices.
    """
    heap = [(load, name) for name, load in loads.items()]
    heapq.heapify(heap)
    pieces = min(size, len(loads) // len(tokens)) if spread and 0 < len(tokens) < len(loads) else 1
    assigned: list[dict[str, tuple[int, ...]]] = []
    for cost in tokens:
        share: dict[str, tuple[int, ...]] = {}
        chosen = [heapq.heappop(heap) for _ in range(pieces)]
        for piece, (load, name) in enumerate(chosen):
            indices = tuple(range(piece * size // pieces, (piece + 1) * size // pieces))
            share[name] = indices
            heapq.heappush(heap, (load + cost * len(indices) // size, name))
        assigned.append(share)
    return assigned
