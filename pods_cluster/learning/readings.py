"""Statistics of micro-batches that stay on the device until their step is over, and come to the host in one transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from pods_cluster.learning.microbatches import MicroBatch
from pods_cluster.learning.step_metrics import TokenStats
from pods_cluster.types import GroupId


@dataclass(slots=True)
class Reading:
    """Statistics of a micro-batch that are still on the device: first the sums, then the maxima, by these names."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    values: Float32[Tensor, " names"]

    @classmethod
    def of(cls, sums: Mapping[str, Float32[Tensor, ""]], maxima: Mapping[str, Float32[Tensor, ""]]) -> Reading:
        values = torch.stack([value.detach().float() for value in (*sums.values(), *maxima.values())])
        return cls(tuple(sums), tuple(maxima), values)


def groups_without_loss(update: Sequence[MicroBatch], readings: Sequence[Reading]) -> tuple[GroupId, ...]:
    """The groups in those micro-batches of a skipped update whose loss is not finite."""
    groups = [
        sequence.locator.group
        for microbatch, reading in zip(update, readings, strict=True)
        if not math.isfinite(to_host([reading]).sums["loss"])
        for sequence in microbatch.sequences
    ]
    return tuple(dict.fromkeys(groups))


def to_host(readings: Sequence[Reading]) -> TokenStats:
    """Add the statistics of a step up, after one transfer from the device."""
    total = TokenStats()
    if readings:
        values = iter(torch.cat([reading.values for reading in readings]).tolist())
        for reading in readings:
            sums = {name: next(values) for name in reading.sums}
            total.add(TokenStats(sums, {name: next(values) for name in reading.maxima}))
    return total
