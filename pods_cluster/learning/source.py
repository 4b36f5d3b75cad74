"""The learner's parameters as they are sent and saved: Hugging Face names, full shapes, adapters merged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pods_cluster.learning.forward import inner
from pods_cluster.weights.types import TensorSpec


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
        with self._whole(entries):
            if self.rank != 0:
                return []
            return [self._full(entry) for entry in entries]

    def _whole(self, entries: list[_Entry]) -> Any:
        if not self.partitioned:
            return nullcontext()
        import deepspeed

        needed: list[nn.Parameter] = []
        for entry in entries:
            needed.append(entry.parameter)
            if entry.adapter is not None:
                needed += [p for name, p in entry.adapter.named_parameters() if "lora_" in name]
        return cast(Any, deepspeed).zero.GatheredParameters(needed, modifier_rank=None)

    def _full(self, entry: _Entry) -> Tensor:
        if entry.adapter is not None:
            # Merged in float32: in bfloat16 a small update of a large weight would round away twice.
            weight = entry.parameter.float() + _delta(entry.adapter)
            return weight.to(entry.parameter.dtype)
        # A partitioned parameter is released when the gathering ends: keep a copy.
        return entry.parameter.detach().clone() if self.partitioned else entry.parameter.detach()


def _delta(layer: Any) -> Tensor:
    """float32 sum of scaling x B A over a PEFT layer's active adapters, in the shape of its base weight."""
    total: Tensor | None = None
    for name in layer.active_adapters:
        if name in getattr(layer, "lora_A", {}):
            delta = layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float() * layer.scaling[name]
            if layer.fan_in_fan_out:
                delta = delta.t()
        else:  # embeddings keep their factors elsewhere
            delta = layer.get_delta_weight(name).float()
        total = delta if total is None else total + delta
    if total is None:
        raise RuntimeError(f"{layer}: no active adapter")
    return total
