"""Low-rank adapters in a weight update: collecting their factors, and merging them bit-identically on both ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pods_cluster.weights.protocol import AdapterFactor, TensorSpec, WeightLoadError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_CHUNK = 1 << 24
"""Elements of a weight that are merged at a time: 128 MB in float64."""


def merged_weight(
    base: Float[Tensor, "rows columns"],
    a: Float[Tensor, "rank in"],
    b: Float[Tensor, "out rank"],
    scale: float,
    *,
    transposed: bool = False,
) -> Float[Tensor, "rows columns"]:
    """base + scale x B A in the base's dtype, as a new tensor. `base` is [out, in], or [in, out] if `transposed`.

    The product is computed in float64 and the sum in float32, then cast. In float32 the order in which a product is
    summed, which differs between devices and libraries, would show in the last bit. A float64 product is exact enough
    that learner and engine hold the same bits after the cast, so their fingerprints can be compared.
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
class WeightAdapter:
    """Adapter of one weight: its two factors."""

    weight: str
    a: Float[Tensor, "rank in"]
    b: Float[Tensor, "out rank"]
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that it is for."""
        product = (self.b.shape[0], self.a.shape[1])
        return product[::-1] if self.transposed else product

    def narrow(self, dim: int, start: int, length: int) -> WeightAdapter:
        """The adapter of a part of the weight: of `length` rows (`dim` 0) or columns (1) from `start` on."""
        if (dim == 0) != self.transposed:
            return replace(self, b=self.b.narrow(0, start, length))
        return replace(self, a=self.a.narrow(1, start, length))

    def merged_with(self, base: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """Merged weight, a new tensor on the device of `base`. Raises WeightLoadError if the shapes do not fit."""
        if tuple(base.shape) != self.shape:
            raise WeightLoadError(
                f"weight update: {self.weight} has an adapter of shape {self.shape} at the learner and shape "
                f"{tuple(base.shape)} here; both must load the same model.path"
            )
        device = base.device
        return merged_weight(base, self.a.to(device), self.b.to(device), self.scale, transposed=self.transposed)


class AdapterCollector:
    """Collects the factors of one version, bucket by bucket. They are small beside the model, so all are kept."""

    def __init__(self) -> None:
        self._factors: dict[str, dict[str, tuple[AdapterFactor, Tensor]]] = {}

    def add(self, tensors: Iterable[tuple[TensorSpec, Float[Tensor, "rows columns"]]]) -> None:
        """Keep copies of a bucket's tensors."""
        for spec, tensor in tensors:
            factor = spec.factor
            if factor is None:
                raise WeightLoadError(f"weight update: {spec.name} is not part of an adapter")
            self._factors.setdefault(factor.weight, {})[factor.side] = (factor, tensor.clone())

    def __iter__(self) -> Iterator[WeightAdapter]:
        """Adapters by weight. Raises WeightLoadError for one that lacks a factor."""
        for weight, sides in self._factors.items():
            if missing := {"A", "B"} - sides.keys():
                raise WeightLoadError(f"weight update: the adapter of {weight} came without its {missing.pop()}")
            (factor, a), (_, b) = sides["A"], sides["B"]
            yield WeightAdapter(weight, a, b, factor.scale, factor.transposed)

    def weights(self) -> list[str]:
        """Names of the weights that have an adapter."""
        return list(self._factors)
