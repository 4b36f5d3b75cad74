"""The engine protocol: what a generator worker asks of whatever makes its rollouts.

An engine is driven by one thread: `submit`, `abort`, `step` and the weight calls never run at the same time. It is
shaped for vLLM (single requests finish, stream and abort alone; requests are kept across a weight update) and for the
small built-in engine alike.
"""

from __future__ import annotations

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
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    aborted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0
    busy_seconds: float = 0.0


class Engine(Protocol):
    """Makes rollouts from token ids.

    `version` is the weight version that it serves: -1 until weights of a known version were received or named.
    After a failed `receive` the engine is closed (`closed` is true, `step` refuses) until a full `receive` succeeds.
    """

    version: int
    closed: bool

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

    def connect(self, invitation: Invitation) -> None:
        """Join a broadcast group; blocks until all met. Raises WeightTransferError at the invitation's deadline."""
        ...

    def receive(self, update: WeightUpdate) -> None:
        """Take one full version between two steps; requests in flight are kept and go on under the new weights.

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
