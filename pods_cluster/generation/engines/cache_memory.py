"""Budget of the key/value cache: how many rollouts the built-in engine may hold, and what memory is free."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedConfig

from pods_cluster.generation.engine import EngineError

DEFAULT_SHARE = 0.25
"""Part of the memory that is free at the start which the cache may take when no size is given."""


class KVBudget:
    """Bounds the rows by the length that they may reach, so that no rollout is ever evicted for want of memory."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, max_sequences: int, kv_bytes: int | None) -> None:
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.token_bytes = 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize
        self.max_sequences = max_sequences
        self.kv_bytes = int(available_bytes() * DEFAULT_SHARE) if kv_bytes is None else kv_bytes

    @property
    def tokens(self) -> int:
        """Tokens that the cache may hold."""
        return max(1, self.kv_bytes // self.token_bytes)

    def rows(self, length: int) -> int:
        """Rows in flight when the longest of them may reach `length` tokens; at least one."""
        return max(1, min(self.max_sequences, self.tokens // max(1, length)))

    def check(self, key: str, length: int) -> None:
        """Raises EngineError if one rollout of `length` tokens alone is too large."""
        if length > self.tokens:
            raise EngineError(
                f"request {key}: {length} tokens need {length * self.token_bytes:,} bytes of key/value cache and "
                f"{self.kv_bytes:,} are allowed; raise generator.engine_options.kv_cache_gb or lower "
                f"generator.max_tokens"
            )


def available_bytes() -> int:
    """Memory of this machine that is free for use."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30
