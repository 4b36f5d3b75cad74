"""The Hugging Face causal LM of the built-in engine: loading, end tokens, attention masks, new weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.self_check import choose_attention
from pods_cluster.weights.protocol import TensorSpec

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

Mask = Float[Tensor, "rows 1 queries columns"] | dict[str, Float[Tensor, "rows 1 queries columns"]]
"""Added to attention scores: 0 where a query sees a column, else the lowest number. By type of layer where there are two."""


def load_model(
    path: str,
    *,
    dtype: str,
    device: str = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The model in `path` in eval mode, with `overrides` in place of values of its config.json.

    Raises EngineError naming the path and the cause.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            **(overrides or {}),
        )
    except Exception as error:
        raise EngineError(
            f"model.path: {path!r} cannot be loaded as a causal language model: {type(error).__name__}: {error}"
        ) from error
    try:
        model = model.to(device)
    except Exception as error:
        raise EngineError(
            f"generator.engine_options.device: {device!r} cannot be used here ({error}); set cpu, or leave it out"
        ) from error
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token that ends a completion: those of the generation config (or the model's), and the tokenizer's."""
    generation: GenerationConfig | None = model.generation_config
    found = [generation.eos_token_id if generation is not None else None, getattr(tokenizer, "eos_token_id", None)]
    if found[0] is None:
        found[0] = getattr(model.config, "eos_token_id", None)
    ids: set[int] = set()
    for item in found:
        if isinstance(item, int):
            ids.add(item)
        elif item is not None:
            ids.update(int(token) for token in item)
    return tuple(sorted(ids))


class Forward:
    """Calls the model with this engine's cache, masks and attention.

    Decoding uses grouped batched products where the model goes through transformers' attention interface. A model for
    which a batch does not give what its rows give alone is refused by EngineError.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        layers = set(getattr(config, "layer_types", None) or ())
        if unknown := layers - SUPPORTED_LAYERS:
            raise EngineError(
                f"model.path: {model.config.model_type} has layers of type {', '.join(sorted(unknown))}, which the "
                f"transformers engine cannot batch; use generator.engine: vllm"
            )
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        self.window: int | None = window if window and (not layers or "sliding_attention" in layers) else None
        self.mixed = bool(layers) and "sliding_attention" in layers
        self.model = model
        self.vocabulary = int(config.vocab_size)
        self.context = getattr(config, "max_position_embeddings", None)
        self.device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        choose_attention(self)

    def __call__(
        self,
        ids: Int64[Tensor, "rows tokens"],
        positions: Int64[Tensor, "rows tokens"],
        cache: Any = None,
        mask: Mask | None = None,
        keep: Int64[Tensor, " kept"] | int = 0,
    ) -> Float[Tensor, "rows kept vocab"]:
        """Logits; `keep` names the places of the sequence to compute them at (0: all)."""
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **arguments).logits
        if not self._keeps_logits and not isinstance(keep, int):
            logits = logits[:, keep]
        return logits

    def causal_mask(self, rows: int, length: int) -> Mask:
        """Mask of a right-padded batch that starts at position 0. Causality alone hides the padding from the tokens."""
        query = torch.arange(length, device=self.device)[:, None]
        column = torch.arange(length, device=self.device)[None]
        return self._masks((column <= query)[None].expand(rows, -1, -1), query[None], column[None])

    def decode_mask(self, positions: Int64[Tensor, " rows"], width: int) -> Mask:
        """Mask over `width` columns of one query a row, at `positions`."""
        column = torch.arange(width, device=self.device)[None, None]
        query = positions.to(self.device)[:, None, None]
        return self._masks(column <= query, query, column)

    def _masks(
        self,
        seen: Bool[Tensor, "rows queries columns"],
        query: Int64[Tensor, "#rows queries 1"],
        column: Int64[Tensor, "1 1 columns"],
    ) -> Mask:
        full = self._additive(seen)
        if self.window is None:
            return full
        sliding = self._additive(seen & (column > query - self.window))
        return {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding

    def _additive(self, seen: Bool[Tensor, "rows queries columns"]) -> Float[Tensor, "rows 1 queries columns"]:
        zero = torch.zeros((), dtype=self.model.dtype, device=seen.device)
        return torch.where(seen, zero, torch.finfo(self.model.dtype).min)[:, None]


class WeightLoad:
    """Loads one full version into a model, in place and by Hugging Face name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._by_name = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._missing = dict(self._names)

    def take(self, tensors: Iterable[tuple[TensorSpec, Tensor]]) -> None:
        """Copy a bucket in. Raises EngineError for a name or shape that the model does not have."""
        for spec, tensor in tensors:
            parameter = self._by_name.get(spec.name)
            if parameter is None:
                raise EngineError(
                    f"weight update: the model has no parameter {spec.name!r}; learner and generator differ"
                )
            if tuple(parameter.shape) != tuple(tensor.shape):
                raise EngineError(
                    f"weight update: {spec.name} has shape {tuple(tensor.shape)} at the learner and "
                    f"{tuple(parameter.shape)} here; both must load the same model.path"
                )
            with torch.no_grad():
                parameter.copy_(tensor)
            self._missing.pop(id(parameter), None)

    def finish(self) -> None:
        """Raises EngineError naming parameters that no bucket held."""
        if self._missing:
            names = sorted(self._missing.values())
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise EngineError(f"weight update: {len(names)} parameter(s) were not sent: {shown}")
