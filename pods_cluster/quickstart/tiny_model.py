"""The quickstart's decoder: a Qwen2 of about one million parameters with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from pods_cluster.quickstart.character_tokenizer import BOS_ID, EOS_ID, PAD_ID


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of the decoder. The head dimension, `hidden / heads`, is 64, as vLLM's attention needs it."""

    hidden: int = 128
    layers: int = 4
    heads: int = 2
    mlp: int = 512
    context: int = 32
    # Standard deviation of the random weights, about 1/sqrt(hidden). With the usual 0.02 a model this narrow needs
    # three times as many steps to learn to add.
    init_std: float = 0.08


def build_model(size: ModelSize, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Make a float32 decoder in eval mode, initialised from `seed` alone; the caller's random state does not change."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context,
        initializer_range=size.init_std,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return model.eval()
