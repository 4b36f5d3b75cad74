"""Merging an adapter into a vLLM model: base + scale x B A, layer by layer, in the storage that captured graphs read.

The base comes from the files of `model.path` at each update: vLLM fuses, shards, quantises and (on a CPU) packs what it
loads, and a second copy on the card would take the room of its cache. Where the model keeps its parameters as they come,
merged weights go straight to their places (`direct_adapter`), past vLLM's loaders. Merged weights decode as fast as ever,
where vLLM's own adapters cost a kernel more for each layer and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pods_cluster.generation.engines.vllm.compat import finalize_layerwise_reload, initialize_layerwise_reload
from pods_cluster.generation.engines.vllm.direct_adapter import DirectAdapter
from pods_cluster.generation.engines.vllm.parameters import unfused
from pods_cluster.weights.adapter import WeightAdapter
from pods_cluster.weights.base_checkpoint import CheckpointFiles
from pods_cluster.weights.protocol import WeightLoadError

_REMEDY = "set learner.lora.send: merged"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module of a vLLM model, and the Hugging Face names of all parameters that it is loaded from."""

    module: torch.nn.Module
    names: tuple[str, ...]


class VllmAdapter:
    """Merges adapters into one worker's model, which was loaded from `path` (at `revision`) in `dtype`."""

    def __init__(self, model: torch.nn.Module, path: str, dtype: torch.dtype, revision: str | None = None) -> None:
        """Raises WeightLoadError where the files cannot be read."""
        self._model: Any = model
        self._dtype = dtype
        try:
            self._files = CheckpointFiles(path, revision)
        except Exception as error:
            raise WeightLoadError(
                f"an adapter needs the weights of model.path, and {path!r} cannot be read ({error}); {_REMEDY}"
            ) from error
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._direct: DirectAdapter | None = None
        self._checked = False
        self._layers: dict[str, _Layer] = {}
        for prefix, module in model.named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            names = tuple(full for name in own for full in unfused(f"{prefix}.{name}", packed))
            self._layers |= dict.fromkeys(names, _Layer(module, names))

    @property
    def direct(self) -> bool:
        """Whether adapters go straight into the model's storage: known after the first one."""
        return self._direct is not None

    @torch.no_grad()
    def load(
        self, adapter: list[WeightAdapter], device: torch.device, model_config: Any, *, direct: bool = True
    ) -> None:
        """Merge all of `adapter`; `direct`: past vLLM's loaders where the model allows it. Raises WeightLoadError; the model
        is unusable then, until another `load`."""
        if not self._checked and direct:
            self._direct = DirectAdapter.of(self._model, adapter, self._files, device)
        self._checked = True  # afterwards the model holds its own weights no more, against which that is proven
        if self._direct is not None and self._direct.takes(adapter):
            self._direct.load(adapter)
            return
        self._direct = None
        adapted = {item.weight: item for item in adapter}
        if unknown := [name for name in adapted if name not in self._layers or name not in self._files]:
            raise WeightLoadError(
                f"{len(unknown)} adapted parameter(s) have other names in the engine or in the files of model.path, "
                f"{unknown[0]} first; {_REMEDY}"
            )
        touched = {id(layer.module): layer for name in adapted if (layer := self._layers[name])}
        for layer in touched.values():
            if absent := [name for name in layer.names if name not in self._files]:
                raise WeightLoadError(f"model.path holds no {absent[0]}, which an adapter is merged beside; {_REMEDY}")
            # Fused layers are loaded whole: neighbours without an adapter come from the files as they are.
            tensors = []
            for name in layer.names:
                base = self._files[name].to(device, self._dtype)
                tensors.append((name, adapted[name].merged_with(base) if name in adapted else base))
            initialize_layerwise_reload(layer.module)
            try:
                self._model.load_weights(tensors)
            finally:
                finalize_layerwise_reload(layer.module, model_config)
