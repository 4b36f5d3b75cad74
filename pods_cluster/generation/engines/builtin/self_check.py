"""Self-check of the built-in engine: rows of different length in one batch against the model's own forward, before the
first rollout. Architectures differ in what they make of masks, positions and a cache, and most say nothing when they
read them otherwise than meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.kv_cache import ATTENTION, SlotCache
from pods_cluster.generation.engines.builtin.right_padding import right_padded
from pods_cluster.generation.engines.cache_memory import available_bytes

if TYPE_CHECKING:
    from pods_cluster.generation.engines.builtin.hf_model import Forward

DECODED = 3
"""Tokens of each row that are decoded one by one; those before them are prefilled."""
OWN_WINDOWS = ("window_size", "attention_window_size")
"""Fields of a local window that the model's own code applies; `sliding_window` is in this engine's masks."""
LONGEST_WINDOW = 1024


@torch.inference_mode()
def choose_attention(forward: Forward) -> None:
    """Set the fastest attention with which a batch gives the log-probabilities of each row alone.

    They are compared in float32 where the memory allows, as rounding hides small errors. Raises EngineError when there is
    none.
    """
    model = forward.model
    if _needs_eager(model):
        model.set_attn_implementation("eager")
    rows = _rows(model, forward.vocabulary)
    with _in_float32(model) as exact:
        try:
            expected = torch.cat([_alone(model, row) for row in rows])
        except RuntimeError:  # code that takes one dtype alone
            if not exact:
                raise
        else:
            return _choose(forward, rows, expected)
    return _choose(forward, rows, torch.cat([_alone(model, row) for row in rows]))


def _choose(forward: Forward, rows: list[list[int]], expected: Float[Tensor, "tokens vocab"]) -> None:
    model = forward.model
    if not torch.isfinite(expected).all():
        raise EngineError(
            f"model.path: {model.config.model_type} gives log-probabilities that are no numbers ({model.dtype}): its weights "
            f"are damaged, copy them again, or their format is too narrow, set model.dtype: float32"
        )
    choices: list[str | None] = [None]
    if getattr(type(model), "_supports_attention_backend", False):
        choices = ["eager"] if _needs_eager(model) else [ATTENTION, "eager"]
    problem = ""
    for choice in choices:
        if choice is not None:
            model.set_attn_implementation(choice)
        try:
            found = torch.cat(_batched(forward, rows))
        except Exception as error:
            problem = f"a batch fails with {type(error).__name__}: {error}"
            continue
        difference = (found - expected).abs().mean().item()
        if difference <= _tolerance(expected, model.dtype):
            return
        problem = f"a batch has other log-probabilities than its rows alone, by {difference:.2g} nats on average"
    raise EngineError(
        f"model.path: {model.config.model_type} is a model that the transformers engine cannot batch ({problem}); "
        f"use generator.engine: vllm"
    )


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[bool]:
    """Hold the parameters in float32 meanwhile, if there is memory for it; says whether they were not before."""
    parameters = list(model.parameters())
    needed = 4 * sum(parameter.numel() for parameter in parameters)
    if model.dtype == torch.float32 or model.device.type != "cpu" or needed > available_bytes() // 2:
        yield False
        return
    held = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.float()
        yield True
    finally:
        for parameter, data in zip(parameters, held, strict=True):
            parameter.data = data


def _needs_eager(model: PreTrainedModel) -> bool:
    """Whether other attention than eager leaves a part of the model's out: capped scores, or learned sinks."""
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith(".sinks") for name, _ in model.named_parameters())


def _rows(model: PreTrainedModel, vocabulary: int) -> list[list[int]]:
    """Two rows of token ids of different length, longer than a local window of the model."""
    config = model.config.get_text_config(decoder=True)
    windows = [size for name in OWN_WINDOWS if isinstance(size := getattr(config, name, None), int)]
    window = max([size for size in windows if size <= LONGEST_WINDOW], default=0)
    context = getattr(config, "max_position_embeddings", None) or window + 16
    longest = max(2, min(window + 9, context - DECODED)) + DECODED
    shortest = max(1, longest - DECODED - 4) + DECODED
    return [[(7 * at * at + 3 * at + 5) % vocabulary for at in range(length)] for length in (longest, shortest)]


def _alone(model: PreTrainedModel, row: list[int]) -> Float[Tensor, "decoded vocab"]:
    """Log-probabilities after the prefilled tokens of a row, by the model's own forward."""
    ids = torch.tensor([row], device=model.device)
    logits = cast(Any, model)(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits[-DECODED - 1 : -1].float(), -1)


def _batched(forward: Forward, rows: list[list[int]]) -> list[Float[Tensor, "decoded vocab"]]:
    """Log-probabilities after the prefilled tokens of each row, computed in one batch as the engine does."""
    cache, device = SlotCache(), forward.device
    ids, lengths = right_padded([row[:-DECODED] for row in rows])
    count, longest = ids.shape
    cache.begin_prefill()
    positions = torch.arange(longest, device=device)[None].expand(count, -1)
    mask = forward.causal_mask(count, longest)
    logits = forward(ids.to(device), positions, cache, mask, torch.arange(longest, device=device))
    steps = [logits[torch.arange(count), (lengths - 1).to(device)]]
    cache.reserve(count, longest + DECODED)
    cache.store(slice(0, count), torch.arange(count))
    for step in range(DECODED - 1):
        at = lengths + step
        width = int(at.max()) + 1
        cache.begin_decode(at, width)
        tokens = torch.tensor([[row[place]] for row, place in zip(rows, at.tolist(), strict=True)], device=device)
        steps.append(forward(tokens, at[:, None].to(device), cache, forward.decode_mask(at, width))[:, -1])
    log_probs = torch.log_softmax(torch.stack(steps, 1).float(), -1)
    return list(log_probs)


def _tolerance(log_probs: Float[Tensor, "tokens vocab"], dtype: torch.dtype) -> float:
    """Mean difference (nats) that rounding in `dtype` explains."""
    return (1.0 + log_probs.abs().mean().item()) * (1e-5 if dtype == torch.float32 else 1e-2)
