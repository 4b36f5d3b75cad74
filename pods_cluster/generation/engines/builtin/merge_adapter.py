"""Merging an adapter into the built-in engine's model: in place, each version into the weights of `model.path` anew."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from pods_cluster.generation.engine import EngineError
from pods_cluster.weights.adapter import AdapterCollector
from pods_cluster.weights.protocol import TensorSpec


class BaseWeights:
    """Copies of a model's own weights, made when an adapter first changes them."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._lost = False

    def replaced(self) -> None:
        """Whole parameters were loaded: the weights of `model.path` are gone."""
        self._lost = True
        self._kept.clear()

    def __call__(self, name: str, parameter: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The model's own weight of this name. Raises EngineError where it was replaced."""
        if self._lost:
            raise EngineError(
                "weight update: an adapter came to an engine that took whole weights before, so that the adapter's "
                "base is gone; send one or the other (learner.lora.send)"
            )
        if name not in self._kept:
            self._kept[name] = parameter.detach().clone()
        return self._kept[name]


class AdapterLoad:
    """Loads one version into a model; nothing changes before `finish`."""

    def __init__(self, model: PreTrainedModel, base: BaseWeights) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._base = base
        self._collector = AdapterCollector()

    def take(self, tensors: Iterable[tuple[TensorSpec, Tensor]]) -> None:
        self._collector.add(tensors)

    @torch.no_grad()
    def finish(self) -> None:
        """Merge. Raises EngineError or WeightLoadError for a weight that the model does not have or that does not fit."""
        for adapted in self._collector:
            parameter = self._parameters.get(adapted.weight)
            if parameter is None:
                raise EngineError(
                    f"weight update: the model has no parameter {adapted.weight!r}; learner and generator differ"
                )
            parameter.copy_(adapted.merged_with(self._base(adapted.weight, parameter)))
