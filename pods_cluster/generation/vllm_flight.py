"""One rollout on its way through vLLM, and which requests can go on their way at all."""

from __future__ import annotations

from pods_cluster.generation.engine import EngineError
from pods_cluster.types import FinishReason, Rollout, RolloutRequest


class Flight:
    """A request with what the core has made of it so far."""

    __slots__ = ("first_version", "last_version", "logprobs", "request", "request_id", "spared", "token_ids")

    def __init__(self, request: RolloutRequest, request_id: str, logprobs: bool, version: int) -> None:
        self.request = request
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.first_version = self.last_version = version
        self.spared = False
        """Its next pre-emption is a weight update's, not for want of room."""

    def rollout(self, reason: FinishReason) -> Rollout:
        request = self.request
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise EngineError(
                f"request {request.key}: vLLM gave {len(self.logprobs)} log-probabilities for "
                f"{len(self.token_ids)} tokens"
            )
        return Rollout(
            request.group,
            request.index,
            request.prompt_ids,
            self.token_ids,
            self.logprobs,
            reason,
            self.first_version,
            self.last_version,
        )


def check_request(request: RolloutRequest, max_model_len: int, vocabulary: int) -> None:
    """Raises EngineError naming what makes the request impossible, and the setting that allows it."""
    length, sampling = len(request.prompt_ids), request.sampling
    if length == 0:
        raise EngineError(f"request {request.key}: the prompt has no tokens; a template must render at least one")
    if sampling.max_tokens < 1:
        raise EngineError(f"request {request.key}: max_tokens: {sampling.max_tokens} must be at least 1")
    if length + sampling.max_tokens > max_model_len:
        raise EngineError(
            f"request {request.key}: prompt of {length} + max_tokens of {sampling.max_tokens} tokens do not fit the "
            f"engine's length of {max_model_len}; lower generator.max_tokens or data.max_prompt_tokens, or raise "
            "generator.engine_options.max_model_len (up to the model's context)"
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
            f"request {request.key}: top_p: {sampling.top_p} must be in (0, 1] and min_p: {sampling.min_p} in [0, 1]"
        )
