"""A model with a trained adapter, as a learner holds it."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from pods_cluster.config import LoraConfig
from pods_cluster.learning.forward import unwrap_peft
from pods_cluster.learning.policy_model import add_adapters
from pods_cluster.learning.weight_source import AdapterWeights, ModelWeights
from tests.generation.learner import Learner


class AdaptedModel:
    """`model` with random adapters of the paper's size on all linear layers (rank 64, alpha 64)."""

    def __init__(self, model: PreTrainedModel, seed: int, size: float = 0.05, **lora: Any) -> None:
        self.base = copy.deepcopy(model)
        self.peft = add_adapters(copy.deepcopy(model), LoraConfig(**{"rank": 64, "alpha": 64.0, **lora}))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.peft.named_parameters():
            if "lora_" in name:
                parameter.data = size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.adapter = AdapterWeights(self.peft, 0, zero_stage=1)
        self.whole = ModelWeights(self.peft, 0, zero_stage=1)

    def learner(self) -> Learner:
        """Sends the adapter; its fingerprints are those of the merged parameters."""
        return Learner(self.adapter, computed=self.whole)

    def merged(self) -> PreTrainedModel:
        """The plain model that the adapter makes of the base, by PEFT's own hand in float32."""
        model = copy.deepcopy(self.peft).float()
        return cast(PreTrainedModel, cast(Any, model).merge_and_unload()).eval()

    def plain(self) -> Any:
        """Base and adapter as the learner computes them."""
        return unwrap_peft(self.peft).eval()
