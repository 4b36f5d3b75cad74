"""One rollout on its way through vLLM, and which requests can go on their way at all."""

from __future__ import annotations

from pods_cluster.generation.engine import EngineError
from pods_cluster.types import FinishReason, Rollout, RolloutRequest, spans_of


class Flight:
    """A request with what the core has made of it so far."""

    __slots__ = ("first_version", "last_version", "logprobs", "request", "request_id", "spared", "token_ids", "updates")

    def __init__(self, request: RolloutRequest, request_id: str, logprobs: bool, version: int) -> None:
        self.request = request
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.first_version = self.last_version = version
        self.updates: list[tuple[int, int]] = []
        self.spared = False
        """Its next pre-emption is a weight update's, not for want of room."""

    def updated(self, version: int) -> None:
        """New weights came in place of `version`: its keys and values are made again from its first token on."""
        self.updates.append((version, len(self.token_ids)))
        self.spared = True

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
            spans=spans_of(self.updates, self.last_version, len(self.token_ids)),
        )
