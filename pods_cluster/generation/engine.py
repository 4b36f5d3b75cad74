"""The engine protocol: what a generator worker asks of whatever makes its rollouts.

An engine is driven by one thread: `submit`, `abort`, `step` and the weight calls never run at the same time, but for `stage` and,
where the engine allows it, `fingerprints`. It is shaped for vLLM (single requests finish, stream and abort alone; requests are
kept across a weight update) and for the small built-in engine alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pods_cluster.types import Rollout, RolloutRequest
from pods_cluster.weights.protocol import Invitation, WeightUpdate


class EngineError(Exception):
    """The engine cannot go on (or cannot start); the text says why and what to change."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start (tokens, rollouts, seconds) and gauges of now.

    `kv_cache_usage` is a share in [0, 1]; `busy_seconds` is time spent in `step` while anything was in flight.
    `recomputed_tokens` are those of prompts and completions whose keys and values were made anew after a weight update.
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    aborted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    kv_cache_usage: float = 0.0
    busy_seconds: float = 0.0


COUNTS = (
    "generated_tokens",
    "prompt_tokens",
    "aborted_tokens",
    "finished",
    "aborted",
    "preemptions",
    "recomputed_tokens",
)
"""The fields of `EngineStats` that an engine counts as it goes."""


class Engine(Protocol):
    """Makes rollouts from token ids.

    `version` is the weight version that it serves: -1 until weights of a known version were received or named.
    After a failed `receive` the engine is closed (`closed` is true, `step` refuses) until a full `receive` succeeds.
    """

    version: int
    closed: bool

    @property
    def fingerprints_beside(self) -> bool:
        """Whether `fingerprints` may be called from another thread while steps are made (and no version is taken)."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. A request that can never fit raises EngineError naming it; none of them is queued then."""
        ...

    def step(self) -> list[Rollout]:
        """Advance by one step; return the rollouts that finished in it (aborted ones too, with partial tokens)."""
        ...

    def abort(self, keys: Iterable[str]) -> None:
        """End requests early by their key; unknown and finished keys are ignored. They come back from `step`."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Log-probabilities of given completions: for each (prompt ids [P], token ids [T]) the T natural logs.

        Used as the probe that proves engine and learner equal; runs between steps and leaves requests alone.
        """
        ...

    def rescore(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """Fill in the log-probabilities (natural logs, one a token) that the engine left out while it sampled.

        Only of rollouts whose tokens were all sampled from the weights that the engine still serves; those of others
        stay None. `temperature` is the one that they were sampled at.
        """
        ...

    def adopt_version(self, version: int) -> None:
        """Serve the weights that were loaded from `model.path` as `version`, without a transfer.

        For runs without a learner. Raises EngineError when the engine is closed.
        """
        ...

    def connect(self, invitation: Invitation) -> None:
        """Join a broadcast group; blocks until all met. Raises WeightTransferError at the invitation's deadline."""
        ...

    def stage(self, update: WeightUpdate, *, check_memory: bool = True) -> bool:
        """Take one full version beside the steps, which go on under the old weights; `receive` then only loads it.

        Another thread calls it while the engine's own is at work. False: this engine, or the free
        memory (`check_memory`), does not allow it, nothing was received, and `receive` does all. Raises
        WeightTransferError on a failure or at the update's deadline; the engine serves its old weights on.
        """
        ...

    def receive(self, update: WeightUpdate) -> None:
        """Load one full version between two steps; requests in flight are kept and go on under the new weights.

        Raises WeightTransferError on a failure or at the update's deadline; the engine is closed then.
        """
        ...

    def disconnect(self) -> None:
        """Leave the broadcast group, free its sockets; safe twice, and while a transfer hangs in another thread."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of every parameter that the engine computes with, by Hugging Face name."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Free memory and processes."""
        ...


def require_open(closed: bool, call: str) -> None:
    """Raises EngineError where a failed update has left the engine without usable weights."""
    if closed:
        raise EngineError(f"{call}: the engine holds no usable weights since a failed update; a full update reopens it")


def require_version(version: int) -> None:
    """Raises EngineError where no rollout can be attributed to a weight version yet."""
    if version < 0:
        raise EngineError("submit: the engine has no weight version yet; publish version 0 before the first rollout")


def fill_logprobs(engine: Engine, rollouts: Iterable[Rollout], temperature: float, longest: int | None = None) -> None:
    """`Engine.rescore` by way of `Engine.score`; rollouts of more than `longest` tokens in all are passed over."""
    version = engine.version
    wanted = [
        rollout
        for rollout in rollouts
        if rollout.logprobs is None
        and rollout.first_version == rollout.last_version == version
        and (longest is None or rollout.total_tokens <= longest)
    ]
    scores = engine.score([(rollout.prompt_ids, rollout.token_ids) for rollout in wanted], temperature)
    for rollout, logprobs in zip(wanted, scores, strict=True):
        for start, stop in rollout.environment:
            logprobs[start:stop] = [math.nan] * (stop - start)
        rollout.logprobs = logprobs


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
