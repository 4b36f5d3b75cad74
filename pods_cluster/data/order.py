"""The order of the rows of an epoch: pure functions of the seed, so that a run goes on in the order that it began."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

_STREAM = 0x70726F6D70740000  # sets the order apart from every other use of the run's seed


def epoch_order(seed: int, epoch: int, rows: int, *part: int) -> Int64[np.ndarray, " rows"]:
    """Return a permutation of `rows` row indices, as a pure function of the arguments; `part` tells several of an epoch apart.

    It sorts the raw output of PCG64, which NumPy keeps stable across releases, unlike `Generator.permutation`: a run
    resumes in the same order after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_STREAM, epoch, *part)))
    return np.argsort(bits.random_raw(rows), kind="stable")


def block_order(seed: int, epoch: int, rows: int, block: int) -> Int64[np.ndarray, " rows"]:
    """Return a permutation that goes through blocks of so many neighbouring rows, one after the other.

    The blocks come in a seeded order, and the rows of each in one of their own.
    """
    parts = []
    for number in epoch_order(seed, epoch, -(-rows // block)).tolist():
        start = number * block
        parts.append(start + epoch_order(seed, epoch, min(block, rows - start), number))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
