"""Shapes of Qwen2 models that benchmarks give random weights: speed does not depend on the values."""

from __future__ import annotations

from typing import Any

VOCABULARY = 151936
"""Of Qwen2.5's models up to 3B."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
    "26m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    },
}
"""Sizes by name, as transformers' `Qwen2Config` takes them; all tie their embeddings."""
