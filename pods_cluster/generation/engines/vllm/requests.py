"""Requests to vLLM's engine core, and what its outputs say of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.stop_strings import StopStrings
from pods_cluster.types import FinishReason, Rollout, RolloutRequest, SamplingParams, spans_of


class RunningRequest:
    """A rollout's request with what the core has made of it so far."""

    __slots__ = (
        "first_version",
        "last_version",
        "logprobs",
        "preempted_by_update",
        "request",
        "request_id",
        "stop_strings",
        "token_ids",
        "updates",
    )

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        logprobs: bool,
        version: int,
        stop_strings: StopStrings | None = None,
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.first_version = self.last_version = version
        self.updates: list[tuple[int, int]] = []
        self.stop_strings = stop_strings
        self.preempted_by_update = False
        """Its next pre-emption is a weight update's, not for want of room."""

    @property
    def ends_in_a_string(self) -> bool:
        """Whether its last token completes a stop string."""
        return self.stop_strings is not None and self.stop_strings.ends(self.token_ids)

    def updated(self, version: int, *, keep_cache: bool = False) -> int:
        """New weights came in place of `version`: its keys and values are made again from its first token on, unless they
        are kept. Returns how many tokens are computed again."""
        self.updates.append((version, len(self.token_ids)))
        self.preempted_by_update = not keep_cache
        return len(self.request.prompt_ids) + len(self.token_ids) if self.token_ids and not keep_cache else 0

    def rollout(self, reason: FinishReason) -> Rollout:
        """The finished rollout. Raises EngineError where vLLM gave another number of log-probabilities than of tokens."""
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
            spans=spans_of(self.updates, self.last_version, len(self.token_ids)),
        )


def make_request(request_id: str, prompt_ids: list[int], params: Any, salt: str | None = None) -> Any:
    """A request for the core; `params` come from `make_params` or `make_scoring_params`. It shares cached prompts only with
    requests of the same `salt`."""
    return compat.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        external_req_id=request_id,
    )


def make_params(sampling: SamplingParams, end_ids: Sequence[int], seed: int | None, logprobs: bool) -> Any:
    """vLLM's parameters: one completion that ends at any of `end_ids`; no text. Stop strings are ours."""
    return compat.SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        seed=None if sampling.greedy else seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[*end_ids],
        logprobs=0 if logprobs else None,
        detokenize=False,
        output_kind=compat.RequestOutputKind.FINAL_ONLY,
    )


def make_scoring_params(whole_distribution: bool) -> Any:
    """Parameters that make the core report log-probabilities of the prompt's own tokens (or of all tokens there)."""
    return compat.SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=-1 if whole_distribution else 0,
        detokenize=False,
        output_kind=compat.RequestOutputKind.FINAL_ONLY,
    )


def decoded(output: Any) -> tuple[list[str], list[int], list[float] | None, dict[str, str]] | None:
    """One token for each of many requests, their log-probabilities and finish reasons, where an output of our
    scheduler holds that (`scheduler.Decoded`); None for an output of one request."""
    if output.kv_transfer_params is None or "decoded" not in output.kv_transfer_params:
        return None
    ids, tokens, logprobs, ended = output.kv_transfer_params["decoded"]
    return ids, tokens, logprobs, ended


def sampled_logprobs(output: Any) -> list[float]:
    """Natural logs of the output's new tokens; the first column is the sampled token."""
    values = output.new_logprobs.logprobs
    return [values.item()] if values.size == 1 else values[:, 0].tolist()


def prompt_logprobs(output: Any, temperature: float) -> Float[Tensor, " prompt-1"] | None:
    """Natural logs of the prompt's tokens from the second on at `temperature`, where the output holds them.

    vLLM reports them untempered: any other temperature needs the whole distribution (columns: the token itself, then
    all tokens).
    """
    tensors = output.new_prompt_logprobs_tensors
    if tensors is None:
        return None
    values = torch.as_tensor(tensors.logprobs).float()
    if temperature in (0.0, 1.0):
        return values[:, 0]
    return values[:, 0] / temperature - torch.logsumexp(values[:, 1:] / temperature, dim=-1)


def preempted(output: Any) -> bool:
    """Whether the request lost its place in the cache since the last output."""
    return any(event.type.name == "PREEMPTED" for event in output.events or ())


def finish_reason(name: str) -> FinishReason:
    """vLLM's finish reason as ours. Raises EngineError for one that no rollout ends with."""
    try:
        return FinishReason(name)
    except ValueError:
        raise EngineError(
            f"vLLM ended a request with {name!r}, which only it can explain; see the worker's log"
        ) from None
