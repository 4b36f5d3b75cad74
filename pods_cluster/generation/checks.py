"""Requests that can never run, refused before any of them is queued."""

from __future__ import annotations

from pods_cluster.generation.engine import EngineError
from pods_cluster.types import RolloutRequest


def check_request(
    request: RolloutRequest, context: int | None, vocabulary: int, *, limit: str = "model's context", remedy: str = ""
) -> None:
    """Raises EngineError naming the request, the value and the fix. `context` in tokens; None: no limit.

    `limit` says what the context is in the engine's words, `remedy` what else can be changed.
    """
    length, sampling = len(request.prompt_ids), request.sampling
    if length == 0:
        raise EngineError(f"request {request.key}: the prompt has no tokens; a template must render at least one")
    if sampling.max_tokens < 1:
        raise EngineError(f"request {request.key}: max_tokens: {sampling.max_tokens} must be at least 1")
    if context is not None and length + sampling.max_tokens > context:
        raise EngineError(
            f"request {request.key}: prompt of {length} + max_tokens of {sampling.max_tokens} tokens exceed the "
            f"{limit} of {context}; lower generator.max_tokens or data.max_prompt_tokens{remedy}"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise EngineError(
            f"request {request.key}: prompt ids reach from {min(request.prompt_ids)} to {max(request.prompt_ids)}, "
            f"the vocabulary is 0 to {vocabulary - 1}; tokenizer and model differ"
        )
    if not 0.0 <= sampling.temperature < float("inf"):
        raise EngineError(f"request {request.key}: temperature: {sampling.temperature} must be 0 (greedy) or more")
    if not 0.0 < sampling.top_p <= 1.0 or not 0.0 <= sampling.min_p <= 1.0:
        raise EngineError(
            f"request {request.key}: top_p: {sampling.top_p} must be in (0, 1], min_p: {sampling.min_p} in [0, 1]"
        )
