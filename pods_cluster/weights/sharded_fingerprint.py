"""Fingerprints of tensors that lie in shards on several workers, without bringing them together.

A fingerprint is a sum over a tensor's words, each mixed with its position (`fingerprint`), so the sums of disjoint
shards add up to that of the whole. Each tensor-parallel worker sums its own words at their positions in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pods_cluster.weights.fingerprint import WordSums, dtype_name, format_fingerprint, strided_sum, word_sum

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped
    from torch import Tensor

_WORD = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a tensor of `shape`: from `start` on along `dim`, and all of the other dimensions."""

    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


ShardSum = tuple[str, list[int], int, int, int, int]
"""Sum of one shard: dtype, shape of the whole, dim, start, length along dim, sum of its words mod 2^64. A plain tuple,
because vLLM serialises it between processes."""


def shard_sum(tensor: Shaped[Tensor, "*shape"], shard: Shard) -> Int64[Tensor, ""]:
    """Sum of a shard's mixed words, on its device.

    Raises ValueError if the shard does not fit the whole, or begins or ends within a word of it.
    """
    shape, dim = shard.shape, shard.dim
    expected = (*shape[:dim], _length(tensor, dim), *shape[dim + 1 :]) if shape else ()
    if tuple(tensor.shape) != expected or (shape and shard.start + _length(tensor, dim) > shape[dim]):
        raise ValueError(f"a shard {list(tensor.shape)} at {shard.start} of dimension {dim} is none of {list(shape)}")
    if tuple(tensor.shape) == shape:
        return word_sum(tensor)
    width = tensor.element_size() * math.prod(shape[dim + 1 :])
    rows, row = math.prod(shape[:dim]), shape[dim] * width
    first, size = shard.start * width, tensor.shape[dim] * width
    last = rows == 1 and first + size == row
    if first % _WORD or (size % _WORD and not last) or (rows > 1 and row % _WORD):
        raise ValueError(
            f"a shard {list(tensor.shape)} of {list(shape)} begins or ends within a word of {_WORD} bytes, so that its "
            "fingerprint cannot be taken"
        )
    return strided_sum(tensor, rows, row // _WORD if rows > 1 else 0, first // _WORD)


def shard_sums(shards: Iterable[tuple[str, Shaped[Tensor, "*shape"], Shard]]) -> dict[str, ShardSum]:
    """Sums of one worker's shards, by name. Each tensor is read before the next is asked for; the sums are copied to the
    host once."""
    heads: list[tuple[str, str, Shard, int]] = []
    sums = WordSums()
    for name, tensor, shard in shards:
        heads.append((name, dtype_name(tensor), shard, _length(tensor, shard.dim)))
        if tuple(tensor.shape) == shard.shape:
            sums.add(tensor)
        else:
            sums.add_sum(shard_sum(tensor, shard))
    return {
        name: (dtype, list(shard.shape), shard.dim, shard.start, length, total % (1 << 64))
        for (name, dtype, shard, length), total in zip(heads, sums.values(), strict=True)
    }


def combine_shard_sums(workers: Sequence[Mapping[str, ShardSum]]) -> dict[str, str]:
    """Fingerprints, by name, of the tensors that `workers` hold together.

    Copies of one shard must be equal on all workers. Shards that do not fit together get a text that says why, which
    equals no fingerprint.
    """
    found: dict[str, list[ShardSum]] = {}
    for sums in workers:
        for name, value in sums.items():
            found.setdefault(name, []).append(value)
    return {name: _combine(values) for name, values in found.items()}


def _combine(values: list[ShardSum]) -> str:
    dtype, shape, dim, *_ = values[0]
    if any((value[0], list(value[1])) != (dtype, list(shape)) for value in values):
        return "the workers hold other dtypes or shapes: " + ", ".join(f"{v[0]}{list(v[1])}" for v in values)
    total = position = 0
    held: dict[tuple[int, int], int] = {}
    for _, _, _, start, length, part in sorted(values, key=lambda value: value[3:5]):
        if (start, length) in held:
            if held[start, length] != part:
                return f"the workers' copies of {start} to {start + length} along dimension {dim} differ"
            continue
        if start != position:
            return f"the workers hold {start} on after {position} along dimension {dim}"
        held[start, length] = part
        position, total = start + length, total + part
    size = shape[dim] if shape else 1
    if position != size:
        return f"the workers hold {position} of {size} along dimension {dim}"
    return format_fingerprint(dtype, shape, total)


def _length(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.ndim else 1
