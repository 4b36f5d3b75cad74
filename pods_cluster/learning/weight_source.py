"""Sources of the learner's weights for sending and saving: Hugging Face names, full shapes, adapters merged or alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pods_cluster.learning.forward import unwrap_peft
from pods_cluster.weights.adapter import merged_weight
from pods_cluster.weights.protocol import AdapterFactor, TensorSpec


@dataclass(slots=True)
class _Entry:
    spec: TensorSpec
    parameter: nn.Parameter
    adapter: Any = None
    """PEFT layer whose low-rank product is added, or None."""


class ModelWeights:
    """All parameters of the policy, adapters merged: a `WeightSource` that every rank holds and gathers from in step.

    `model` is the Hugging Face model or its PEFT wrapper. Tied parameters are listed once, under the first name. Under
    ZeRO-3 all ranks gather the parameters of a range before anything is sent; rank 0 clones them, and they are released.
    """

    def __init__(self, model: nn.Module, rank: int, *, zero_stage: int) -> None:
        self.rank = rank
        self.partitioned = zero_stage == 3
        self._entries: list[_Entry] = []
        core = unwrap_peft(model)
        layers = dict(core.named_modules())
        for name, parameter in core.named_parameters():  # tied parameters come once
            if ".lora_" in name or ".modules_to_save." in name:
                continue
            layer = None
            if ".base_layer." in name:
                owner, _, leaf = name.partition(".base_layer.")
                name = f"{owner}.{leaf}"
                if leaf == "weight":
                    layer = layers[owner]
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            dtype = str(parameter.dtype).removeprefix("torch.")
            self._entries.append(_Entry(TensorSpec(name, shape, dtype), parameter, layer))

    def specs(self) -> tuple[TensorSpec, ...]:
        """Name, full shape and dtype of each parameter."""
        return tuple(entry.spec for entry in self._entries)

    @torch.no_grad()
    def gather(self, start: int, stop: int) -> list[Float[Tensor, "*shape"]]:
        """Full tensors `start` to `stop` on rank 0, an empty list on the others. A collective under ZeRO-3."""
        entries = self._entries[start:stop]
        needed = [entry.parameter for entry in entries]
        for entry in entries:
            if entry.adapter is not None:
                needed += _factors(entry.adapter)[:2]
        with _gathered(needed, self.partitioned):
            if self.rank != 0:
                return []
            return [self._full(entry) for entry in entries]

    def _full(self, entry: _Entry) -> Float[Tensor, "*shape"]:
        if entry.adapter is not None:
            a, b, scale, transposed = _factors(entry.adapter)
            return merged_weight(entry.parameter.detach(), a.detach(), b.detach(), scale, transposed=transposed)
        # A partitioned parameter is released when the gathering ends, so it is copied.
        return entry.parameter.detach().clone() if self.partitioned else entry.parameter.detach()


class AdapterWeights:
    """Adapter of a PEFT model alone: a `WeightSource` of the factors A and B of each adapted weight, in turn.

    A receiver that has the weights of `model.path` needs nothing else: all other parameters are frozen.
    """

    def __init__(self, model: nn.Module, rank: int, *, zero_stage: int) -> None:
        self.rank = rank
        self.partitioned = zero_stage == 3
        self._entries: list[tuple[TensorSpec, nn.Parameter]] = []
        for owner, layer in unwrap_peft(model).named_modules():
            if not hasattr(layer, "lora_A"):
                continue
            a, b, scale, transposed = _factors(layer)
            factors: list[tuple[Literal["A", "B"], nn.Parameter]] = [("A", a), ("B", b)]
            for side, parameter in factors:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                dtype = str(parameter.dtype).removeprefix("torch.")
                factor = AdapterFactor(f"{owner}.weight", side, scale, transposed)
                self._entries.append((TensorSpec(f"{owner}.lora_{side}.weight", shape, dtype, factor), parameter))

    def specs(self) -> tuple[TensorSpec, ...]:
        """Name, full shape and dtype of each factor."""
        return tuple(spec for spec, _ in self._entries)

    @torch.no_grad()
    def gather(self, start: int, stop: int) -> list[Float[Tensor, "*shape"]]:
        """Full factors `start` to `stop` on rank 0, an empty list on the others. A collective under ZeRO-3."""
        parameters = [parameter for _, parameter in self._entries[start:stop]]
        with _gathered(parameters, self.partitioned):
            if self.rank != 0:
                return []
            return [p.detach().clone() if self.partitioned else p.detach() for p in parameters]


def _gathered(parameters: list[nn.Parameter], partitioned: bool) -> Any:
    """Context in which these parameters are whole; collective under ZeRO-3."""
    if not partitioned:
        return nullcontext()
    import deepspeed

    return cast(Any, deepspeed).zero.GatheredParameters(parameters, modifier_rank=None)


def _factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter, float, bool]:
    """Factors A [rank, in] and B [out, rank] of a PEFT layer's one adapter, its scale, and whether the weight is
    [in, out]."""
    (name,) = layer.active_adapters
    if name in layer.lora_A:
        a, b, transposed = layer.lora_A[name].weight, layer.lora_B[name].weight, bool(layer.fan_in_fan_out)
    else:  # an embedding's weight is [vocabulary, width]
        a, b, transposed = layer.lora_embedding_A[name], layer.lora_embedding_B[name], True
    return a, b, float(layer.scaling[name]), transposed
