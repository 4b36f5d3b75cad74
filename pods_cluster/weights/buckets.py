"""Wire format of a bucket: the bytes of its tensors one after another, without padding, in one uint8 buffer.

The bytes are those of vLLM's packed transfer, so its receivers can read what our sender sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pods_cluster.weights.protocol import TensorSpec, WeightSourceError, WeightUpdate

if TYPE_CHECKING:
    import torch
    from jaxtyping import Shaped, UInt8
    from torch import Tensor

DIGEST_BYTES = 32


def bucket_bytes(update: WeightUpdate, bucket: tuple[int, int]) -> int:
    """Size of a bucket, given as a [start, stop) pair."""
    return sum(spec.nbytes for spec in update.tensors[bucket[0] : bucket[1]])


def largest_bucket(update: WeightUpdate) -> int:
    """Bytes of the largest bucket; 0 without any."""
    return max((bucket_bytes(update, bucket) for bucket in update.buckets), default=0)


def digest(update: WeightUpdate) -> bytes:
    """Digest of everything that both ends must agree on: version, tensors and buckets (not the deadline)."""
    tensors = [(spec.name, tuple(spec.shape), spec.dtype, spec.factor) for spec in update.tensors]
    text = repr((update.version, tensors, update.buckets))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def pack(
    tensors: Sequence[Shaped[Tensor, "*shape"]], specs: Sequence[TensorSpec], buffer: UInt8[Tensor, " bytes"]
) -> None:
    """Copy `tensors` into `buffer`, of the bucket's size and on any device.

    Raises WeightSourceError naming a tensor whose shape or dtype differs from its spec.
    """
    import torch

    if len(tensors) != len(specs):
        raise WeightSourceError(f"the learner gathered {len(tensors)} tensors where {len(specs)} were asked for")
    offset = 0
    for tensor, spec in zip(tensors, specs, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != tuple(spec.shape) or dtype != spec.dtype:
            found, announced = f"{dtype}{list(tensor.shape)}", f"{spec.dtype}{list(spec.shape)}"
            raise WeightSourceError(f"{spec.name}: the learner gathered {found}, announced {announced}")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[offset : offset + spec.nbytes].copy_(flat)
        offset += spec.nbytes


def unpack(
    buffer: UInt8[Tensor, " bytes"], specs: Sequence[TensorSpec]
) -> list[tuple[TensorSpec, Shaped[Tensor, "*shape"]]]:
    """Tensors of the bucket as views of `buffer` (copies only where the bytes are not aligned for their dtype)."""
    rows: list[tuple[TensorSpec, Shaped[Tensor, "*shape"]]] = []
    offset = 0
    for spec in specs:
        dtype = torch_dtype(spec)
        flat = buffer[offset : offset + spec.nbytes]
        if flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()
        rows.append((spec, flat.view(dtype).view(spec.shape)))
        offset += spec.nbytes
    return rows


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Torch's dtype of a spec's name."""
    import torch

    return getattr(torch, spec.dtype)
