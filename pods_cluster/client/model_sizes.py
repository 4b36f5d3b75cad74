"""Sizes of a model from its configuration alone: no weights are read."""

from __future__ import annotations

from pods_cluster.config import Config, ConfigError
from pods_cluster.sizing.card_memory import ModelSizes

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


def model_sizes(config: Config) -> ModelSizes:
    """Bytes of the run's model in `model.dtype`. Raises ConfigError for one whose configuration cannot be read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pods_cluster.generation.engines.cache_memory import KVBudget

    trust, dtype = config.model.trust_remote_code, getattr(torch, config.model.dtype)
    try:
        found = AutoConfig.from_pretrained(config.model.path, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found, trust_remote_code=trust)
    except Exception as error:
        raise ConfigError(
            f"model.path: {config.model.path!r}: its sizes cannot be read: {type(error).__name__}: {error}"
        ) from error
    weights = sum(parameter.numel() for parameter in model.parameters()) * WIDTH[config.model.dtype]
    return ModelSizes(weights, KVBudget(found, dtype, 1, 1).token_bytes)
