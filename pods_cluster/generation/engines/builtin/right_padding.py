"""Rows of token ids as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


def right_padded(
    sequences: Sequence[Sequence[int] | Int64[np.ndarray, " tokens"]],
) -> tuple[Int64[Tensor, "rows longest"], Int64[Tensor, " rows"]]:
    """Token ids, padded with 0 on the right, and lengths."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence)
    return ids, lengths
