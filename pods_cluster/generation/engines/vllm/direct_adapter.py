"""Adapters merged straight into the storage that a vLLM model computes from, past vLLM's loaders.

Those rebuild each layer for every version. Where the model keeps its parameters as they come (`direct_load`), base and
merged weight have one place in it, and a version is one merge and one copy a weight. That it does so is not taken on
trust: before the first adapter each weight must hold the very numbers of the files. The base stays on the device where
that leaves room enough (see `KEEP`); else it comes from the files each time, through the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from pods_cluster.generation.engines.vllm.direct_load import is_plain, narrow
from pods_cluster.generation.engines.vllm.parameters import LocalParameter, local_parameters
from pods_cluster.weights.adapter import WeightAdapter
from pods_cluster.weights.staging import free_bytes

KEEP = 3.0
"""Free memory that the base is kept on the device in, in sizes of it: others on the card go on allocating."""


class BaseFiles(Protocol):
    """Weights of `model.path` by Hugging Face name."""

    def __contains__(self, name: str, /) -> bool: ...
    def __getitem__(self, name: str, /) -> Shaped[Tensor, "*shape"]: ...


class DirectAdapter:
    """Merges adapters of the same weights, version after version, into one worker's parts of them."""

    def __init__(self, parts: Mapping[str, LocalParameter], files: BaseFiles, kept: Mapping[str, Tensor]) -> None:
        self._parts, self._files, self._kept = parts, files, kept

    @classmethod
    def of(
        cls, model: torch.nn.Module, adapter: Sequence[WeightAdapter], files: BaseFiles, device: torch.device
    ) -> DirectAdapter | None:
        """For adapters like this one; None where the model does not hold the weights as the files do."""
        if not is_plain(model):
            return None
        all_parts = {part.name: part for part in local_parameters(model)}
        parts: dict[str, LocalParameter] = {}
        for item in adapter:
            part = all_parts.get(item.weight)
            if part is None or item.weight not in files or part.shard.shape != item.shape:
                return None
            if tuple(files[item.weight].shape) != item.shape or not torch.equal(part.tensor, _base(files, part)):
                return None
            parts[item.weight] = part
        return cls(parts, files, _copies(parts, device))

    @property
    def keeps_base(self) -> bool:
        """Whether the base is on the device."""
        return bool(self._kept)

    def takes(self, adapter: Iterable[WeightAdapter]) -> bool:
        """Whether it is an adapter of the same weights."""
        return {item.weight: item.shape for item in adapter} == {
            name: part.shard.shape for name, part in self._parts.items()
        }

    @torch.no_grad()
    def load(self, adapter: Iterable[WeightAdapter]) -> None:
        """Merge all of `adapter`, which `takes` it, into the model."""
        for item in adapter:
            part = self._parts[item.weight]
            base = self._kept.get(item.weight)
            if base is None:
                base = _base(self._files, part)
            part.tensor.copy_(_own_part(item, part).merged_with(base))


def _base(files: BaseFiles, part: LocalParameter) -> Shaped[Tensor, "*shape"]:
    """This worker's part of a weight of the files, in the model's dtype and on its device."""
    return narrow(files[part.name], part).to(part.tensor.device, part.tensor.dtype)


def _own_part(item: WeightAdapter, part: LocalParameter) -> WeightAdapter:
    if tuple(part.tensor.shape) == part.shard.shape:
        return item
    return item.narrow(part.shard.dim, part.shard.start, part.tensor.shape[part.shard.dim])


def _copies(parts: Mapping[str, LocalParameter], device: torch.device) -> dict[str, Tensor]:
    """Copies of all parts, or none where they would leave too little room."""
    if free_bytes(device) < KEEP * sum(part.tensor.nbytes for part in parts.values()):
        return {}
    try:
        return {name: part.tensor.clone() for name, part in parts.items()}
    except RuntimeError:  # the memory went to another process in the meantime
        return {}
