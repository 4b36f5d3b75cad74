"""The policy computes all of the model's attention, whatever implementation it would get by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

from pods_cluster.config import ModelConfig
from pods_cluster.generation.engines.builtin.hf_model import load_model as load_for_engine
from pods_cluster.learning.policy_model import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, attn_logit_softcapping=0.5),
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["capped scores", "sinks"],
)
def test_what_torchs_kernel_would_leave_out_is_computed(tmp_path: Path, config: Any) -> None:
    make = cast(Any, AutoModelForCausalLM).from_config
    model = make(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    policy = cast(Any, load_model(ModelConfig(path=str(tmp_path), dtype="float32"))).eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.allclose(policy(ids).logits, model(ids).logits, atol=1e-5)


def test_values_of_the_models_settings_are_replaced_in_learner_and_engine(model_folder: Path) -> None:
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "max_position_embeddings": 77}
    learner = load_model(ModelConfig(path=str(model_folder), dtype="float32", overrides=theta))
    engine = load_for_engine(str(model_folder), dtype="float32", overrides=theta)
    for model in (learner, engine):
        assert model.config.max_position_embeddings == 77
    ids = torch.arange(8)[None]
    plain = load_for_engine(str(model_folder), dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(learner(ids).logits, engine(ids).logits)
        assert not torch.allclose(plain(ids).logits, engine(ids).logits), "the rotation is another one"
