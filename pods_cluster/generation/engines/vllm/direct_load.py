"""New weights straight into the storage that a vLLM model computes from, past vLLM's loaders.

vLLM's layerwise reload rebuilds each layer beside the old one, tensor by tensor, and copies it over: most of an update's
time for a model of a few billion parameters. Where the model keeps parameters as they come (unquantised, unpacked; fused,
padded and sharded is no matter), a bucket is one copy instead. That it does so is not taken on trust: the first update
goes through vLLM's own loaders, and only if each parameter then holds the words that came are later ones direct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from pods_cluster.generation.engines.vllm.compat import Attention, UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from pods_cluster.generation.engines.vllm.parameters import LocalParameter, is_packed, local_parameters
from pods_cluster.weights.protocol import TensorSpec, WeightLoadError
from pods_cluster.weights.sharded_fingerprint import shard_sum

Rows = Sequence[tuple[TensorSpec, Shaped[Tensor, "..."]]]
"""Whole tensors of an update."""


class DirectLoader:
    """Copies updates into the storage of one worker's model. `parts` are its own parts of all parameters, by name."""

    def __init__(self, parts: dict[str, LocalParameter]) -> None:
        self._parts = parts

    def check(self, names: Iterable[str]) -> None:
        """Raises WeightLoadError where an update would leave a parameter as it was."""
        if missing := sorted(set(self._parts).difference(names)):
            raise WeightLoadError(
                f"{len(missing)} parameter(s) of the engine are not in the update, {missing[0]} first"
            )

    @torch.no_grad()
    def load(self, rows: Rows) -> None:
        """Copy whole tensors to their places. Raises WeightLoadError for one that has none here."""
        for spec, tensor in rows:
            part = self._parts.get(spec.name)
            if part is None or part.shard.shape != tuple(spec.shape):
                raise WeightLoadError(f"{spec.name} {list(spec.shape)}: the engine holds no such parameter")
            part.tensor.copy_(narrow(tensor, part))


class DirectLoadCheck:
    """Finds out during one update through vLLM's loaders whether later updates can be copied directly.

    The tensors of the update are kept as sums of their words, and compared with the model's parameters afterwards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Their views are found anew afterwards: until then the parameters lie elsewhere.
        self._parts = {part.name: part for part in local_parameters(model)} if is_plain(model) else {}
        self._received: dict[str, Tensor] = {}
        self._fits = bool(self._parts)

    def record(self, rows: Rows) -> None:
        """Take note of one bucket before it is loaded."""
        for spec, tensor in rows:
            part = self._parts.get(spec.name)
            self._fits = (
                self._fits
                and part is not None
                and part.shard.shape == tuple(spec.shape)
                and part.tensor.dtype == tensor.dtype
            )
            if not self._fits:
                return
            assert part is not None
            try:
                self._received[spec.name] = shard_sum(narrow(tensor, part), part.shard)
            except ValueError:  # shards that share a word
                self._fits = False

    def loader(self) -> DirectLoader | None:
        """Call it after the update: a loader for later ones, or None where this model needs vLLM's."""
        if not self._fits:
            return None
        parts = {part.name: part for part in local_parameters(self._model)}
        if set(parts) != set(self._received):
            return None
        loaded = torch.stack([shard_sum(part.tensor, part.shard) for part in parts.values()])
        received = torch.stack([self._received[name] for name in parts])
        return DirectLoader(parts) if bool((loaded == received).all()) else None


def narrow(tensor: Shaped[Tensor, ...], part: LocalParameter) -> Shaped[Tensor, ...]:
    """This worker's part of a whole tensor."""
    if tensor.shape == part.tensor.shape:
        return tensor
    return tensor.narrow(part.shard.dim, part.shard.start, part.tensor.shape[part.shard.dim])


def is_plain(model: Any) -> bool:
    """Whether nothing is computed from the parameters once and kept (quantised, packed or absorbed weights)."""
    if getattr(model, "quant_config", None) is not None:
        return False
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if is_packed(module):
            return False
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False
    return True
