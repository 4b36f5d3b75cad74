"""The learner's parameters as they are sent and saved: Hugging Face names, full shapes, adapters merged or alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pods_cluster.learning.forward import inner
from pods_cluster.weights.adapter import merged
from pods_cluster.weights.protocol import AdapterFactor, TensorSpec


@dataclass(slots=True)
class _Entry:
    spec: TensorSpec
    parameter: nn.Parameter
    adapter: Any = None
    """The PEFT layer whose low-rank product is added, or None."""


class LearnerWeights:
    """A `WeightSource`: every learner rank holds one and calls `gather` in step with the others.

    `model` is the Hugging Face model or its PEFT wrapper. Tied parameters are listed once, under the first name. Under
    ZeRO-3 the parameters of a range are gathered by all ranks before anything is sent, cloned on rank 0, and released.
    """

    def __init__(self, model: nn.Module, rank: int, *, zero_stage: int) -> None:
        self.rank = rank
        self.partitioned = zero_stage == 3
        self._entries: list[_Entry] = []
        core = inner(model)
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
        return tuple(entry.spec for entry in self._entries)

    @torch.no_grad()
    def gather(self, start: int, stop: int) -> list[Tensor]:
        """Full tensors `start` to `stop`; rank 0 gets them, other ranks an empty list. A collective under ZeRO-3."""
        entries = self._entries[start:stop]
        needed = [entry.parameter for entry in entries]
        for entry in entries:
            if entry.adapter is not None:
                needed += _factors(entry.adapter)[:2]
        with _whole(needed, self.partitioned):
            if self.rank != 0:
                return []
            return [self._full(entry) for entry in entries]

    def _full(self, entry: _Entry) -> Tensor:
        if entry.adapter is not None:
            a, b, scale, transposed = _factors(entry.adapter)
            return merged(entry.parameter.detach(), a.detach(), b.detach(), scale, transposed=transposed)
        # A partitioned parameter is released when the gathering ends: keep a copy.
        return entry.parameter.detach().clone() if self.partitioned else entry.parameter.detach()


class AdapterWeights:
    """A `WeightSource` of a PEFT model's adapter alone: factors A and B of each adapted weight, side by side.

    What it sends is complete for a receiver that has the weights of `model.path`: all other parameters are frozen.
    """

    def __init__(self, model: nn.Module, rank: int, *, zero_stage: int) -> None:
        self.rank = rank
        self.partitioned = zero_stage == 3
        self._entries: list[tuple[TensorSpec, nn.Parameter]] = []
        for owner, layer in inner(model).named_modules():
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
        return tuple(spec for spec, _ in self._entries)

    @torch.no_grad()
    def gather(self, start: int, stop: int) -> list[Tensor]:
        """As `LearnerWeights.gather`."""
        parameters = [parameter for _, parameter in self._entries[start:stop]]
        with _whole(parameters, self.partitioned):
            if self.rank != 0:
                return []
            return [p.detach().clone() if self.partitioned else p.detach() for p in parameters]


def _whole(parameters: list[nn.Parameter], partitioned: bool) -> Any:
    """A context in which these parameters are whole; collective under ZeRO-3."""
    if not partitioned:
        return nullcontext()
    import deepspeed

    return cast(Any, deepspeed).zero.GatheredParameters(parameters, modifier_rank=None)


def _factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter, float, bool]:
    """A [rank, in], B [out, rank] and scale of a PEFT layer's one adapter, and whether its weight is [in, out]."""
    (name,) = layer.active_adapters
    if name in layer.lora_A:
        a, b, transposed = layer.lora_A[name].weight, layer.lora_B[name].weight, bool(layer.fan_in_fan_out)
    else:  # an embedding's weight is [vocabulary, width]
        a, b, transposed = layer.lora_embedding_A[name], layer.lora_embedding_B[name], True
    return a, b, float(layer.scaling[name]), transposed
