"""Low-rank adapters on their way: merging them into a base weight, the same to the bit on both ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pods_cluster.weights.protocol import AdapterFactor, TensorSpec, WeightLoadError

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 24
"""Elements of a weight that are merged at a time: 128 MB of float64."""


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool = False) -> Tensor:
    """base + scale x B A in the base's dtype, as a new tensor.

    The product is made in float64 and the sum in float32, then cast. In float32 the order of a product's sums, which
    differs between devices and libraries, would show in the last bit; of a float64 product it is gone before the cast,
    so that learner and engine hold the same bits and their fingerprints can be compared.

    `base` [out, in] (its transpose [in, out] if `transposed`), `a` [rank, in], `b` [out, rank].
    """
    import torch

    result = torch.empty_like(base)
    left, right = (a.t(), b.t()) if transposed else (b, a)
    right = right.double()
    rows = max(1, _CHUNK // max(1, base.shape[1]))
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        delta = (left[part].double() @ right).mul_(scale)
        result[part] = delta.float().add_(base[part].float())
    return result


@dataclass(frozen=True, slots=True)
class Adapted:
    """A weight's two factors."""

    weight: str
    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    def on(self, base: Tensor) -> Tensor:
        """The merged weight, on the device of `base`. Raises WeightLoadError where the shapes do not fit."""
        product = (self.b.shape[0], self.a.shape[1])
        shape = product[::-1] if self.transposed else product
        if tuple(base.shape) != shape:
            raise WeightLoadError(
                f"weight update: {self.weight} has an adapter of shape {shape} at the learner and shape "
                f"{tuple(base.shape)} here; both must load the same model.path"
            )
        device = base.device
        return merged(base, self.a.to(device), self.b.to(device), self.scale, transposed=self.transposed)


class AdapterInbox:
    """The factors of one version as they come, bucket by bucket. Small beside the model, so they are kept whole."""

    def __init__(self) -> None:
        self._factors: dict[str, dict[str, tuple[AdapterFactor, Tensor]]] = {}

    def take(self, tensors: Iterable[tuple[TensorSpec, Tensor]]) -> None:
        """Keep copies of a bucket's tensors."""
        for spec, tensor in tensors:
            factor = spec.factor
            if factor is None:
                raise WeightLoadError(f"weight update: {spec.name} is no part of an adapter")
            self._factors.setdefault(factor.weight, {})[factor.side] = (factor, tensor.clone())

    def __iter__(self) -> Iterator[Adapted]:
        """One weight after the other. Raises WeightLoadError for one that lacks a factor."""
        for weight, sides in self._factors.items():
            if missing := {"A", "B"} - sides.keys():
                raise WeightLoadError(f"weight update: the adapter of {weight} came without its {missing.pop()}")
            (factor, a), (_, b) = sides["A"], sides["B"]
            yield Adapted(weight, a, b, factor.scale, factor.transposed)

    def weights(self) -> list[str]:
        return list(self._factors)
