"""Every architecture is computed as transformers computes each row alone, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.engine import TransformersEngine
from pods_cluster.types import GroupId, RolloutRequest, SamplingParams

LLAMA_LIKE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_LIKE = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
EAGER = {"attn_implementation": "eager"}  # what leaves nothing of the model out
IN_TURN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

BATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen3, normalised heads": ("Qwen3", LLAMA_LIKE | {"head_dim": 8}),
    "qwen3, experts": ("Qwen3Moe", LLAMA_LIKE | EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "mistral, window": ("Mistral", LLAMA_LIKE | {"head_dim": 8, "sliding_window": 6}),
    "mixtral, window": ("Mixtral", LLAMA_LIKE | {"num_local_experts": 4, "sliding_window": 6}),
    "gemma2, capped scores": (
        "Gemma2",
        LLAMA_LIKE | EAGER | {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 0.5},
    ),
    "gemma3, windows in turn": ("Gemma3Text", LLAMA_LIKE | IN_TURN | {"head_dim": 8, "sliding_window": 6}),
    "cohere2, windows in turn": ("Cohere2", LLAMA_LIKE | IN_TURN | {"sliding_window": 6}),
    "gpt_oss, sinks and window": (
        "GptOss",
        LLAMA_LIKE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "deepseek_v3, latent heads": (
        "DeepseekV3",
        LLAMA_LIKE
        | EXPERTS
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "mpt, alibi": ("Mpt", {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}),
    "falcon, shared head": ("Falcon", LLAMA_LIKE),
    "gptj, partial rotary": ("GPTJ", GPT_LIKE | {"rotary_dim": 4}),
    "gpt_neox, partial rotary": ("GPTNeoX", LLAMA_LIKE | {"rotary_pct": 0.5}),
    "phi, partial rotary": ("Phi", LLAMA_LIKE | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3, window": ("Phi3", LLAMA_LIKE | {"sliding_window": 6}),
    "olmo2, norms behind": ("Olmo2", LLAMA_LIKE),
    "starcoder2, window": ("Starcoder2", LLAMA_LIKE | {"sliding_window": 6}),
    "gpt2, learned positions": ("GPT2", GPT_LIKE),
    "opt, shifted positions": ("OPT", LLAMA_LIKE | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo, own windows": (
        "GPTNeo",
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 6,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    ),
    "bloom, alibi from the mask": ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon, alibi": ("Falcon", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                                 "alibi": True}),
    "recurrent_gemma, a state": (
        "RecurrentGemma",
        LLAMA_LIKE | {"num_key_value_heads": 1, "attention_window_size": 6},
    ),
    "mamba, a state": ("Mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}),
    "llama4, chunks": (
        "Llama4Text",
        LLAMA_LIKE | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 6},
    ),
}  # fmt: skip


def build(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights, which make sharper distributions than those that models start with."""
    config: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**sizes)
    make: Callable[[PreTrainedConfig], Any] = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return cast(PreTrainedModel, model)


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_gives_what_each_row_gives_alone(name: str) -> None:
    engine, plain = TransformersEngine(build(*BATCHED[name]), [], max_sequences=4), build(*BATCHED[name])
    engine.version = 0
    prompts = [tuple(range(3, 3 + length)) for length in (3, 9, 14)]
    sampling = SamplingParams(max_tokens=20, seed=3)
    engine.submit([RolloutRequest(GroupId(0, row), 0, prompt, sampling) for row, prompt in enumerate(prompts)])
    done = []
    while engine.in_flight:
        done += engine.step()
    scored = engine.score([(rollout.prompt_ids, rollout.token_ids) for rollout in done], 1.0)
    for rollout, scores in zip(done, scored, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
            log_probs = cast(Any, plain)(ids, use_cache=False).logits[0].log_softmax(-1)
        places = torch.arange(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
        expected = log_probs[places, torch.tensor(rollout.token_ids)].tolist()
        assert rollout.logprobs == pytest.approx(expected, abs=1e-5)
        assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss, sinks and window", "gemma3, windows in turn"])
def test_the_comparison_leaves_half_precision_as_it_was(name: str) -> None:
    model = build(*BATCHED[name]).bfloat16()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    TransformersEngine(model, [])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    """Also where rounding is as large as what is wrong."""
    model = cast(Any, build(*REFUSED[name])).to(dtype)
    text = rf"model\.path: {model.config.model_type}.* the transformers engine cannot batch.*generator\.engine: vllm"
    with pytest.raises(EngineError, match=text):
        TransformersEngine(model, [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_told(value: float) -> None:
    """They are not taken for an architecture that cannot be batched."""
    model = cast(Any, build(*BATCHED["qwen2"]))
    with torch.no_grad():
        model.model.norm.weight.fill_(value)
    with pytest.raises(EngineError, match=r"model\.path: qwen2 gives log-probabilities that are no numbers .*damaged"):
        TransformersEngine(model, [])
