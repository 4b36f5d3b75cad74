"""An engine that sleeps instead of computing, to test the service at rates that no test machine can generate.

Lengths and tokens of a rollout depend on its seed, group and index alone; only the time is made up.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from pods_cluster.generation.engine import EngineError, EngineStats, fill_logprobs, require_open, require_version
from pods_cluster.generation.engines.sampling import stream_key, uniforms
from pods_cluster.generation.engines.weight_receiving import WeightReceiving
from pods_cluster.types import FinishReason, Rollout, RolloutRequest
from pods_cluster.weights.fingerprint import fingerprint
from pods_cluster.weights.protocol import TensorSpec, WeightUpdate

MIN_SLEEP = 0.001


class _Running(NamedTuple):
    request: RolloutRequest
    length: int
    ends: int
    """Value of the engine's clock, in tokens, at which it is complete."""
    began: float
    version: int
    """The one that the first token was sampled from."""


class PacedEngine(WeightReceiving):
    """`Engine` whose rollouts in flight share `tokens_per_second`, at most `max_sequences` at once; one of them makes at
    most `rollout_tokens_per_second`, so that an engine with few of them is slower, as real ones are.

    Lengths (end token included) follow `lengths` between `shortest` and `longest`: `uniform`, or `geometric` with the
    mean in the middle, cut at the request's max_tokens. Tokens are uniform over `tokens` (ids); a share `accuracy` of
    the rollouts (of several, each row has one in turn) starts with `reward_token`, the others never hold it. Weights
    are received for real and fingerprinted.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[int],
        end_id: int,
        max_sequences: int = 256,
        tokens_per_second: float = 10_000.0,
        rollout_tokens_per_second: float | None = None,
        lengths: Literal["uniform", "geometric"] = "uniform",
        shortest: int = 1,
        longest: int = 128,
        accuracy: float | Sequence[float] = 0.5,
        reward_token: int | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
            raise EngineError(f"engine_options.tokens_per_second: {tokens_per_second} must be above 0")
        single = rollout_tokens_per_second
        if single is not None and not (math.isfinite(single) and single > 0):
            raise EngineError(f"engine_options.rollout_tokens_per_second: {single} must be above 0")
        if not 1 <= shortest <= longest:
            raise EngineError(
                f"engine_options.shortest: {shortest} and longest: {longest} must be ordered and at least 1"
            )
        if lengths not in ("uniform", "geometric"):
            raise EngineError(f"engine_options.lengths: {lengths!r} must be uniform or geometric")
        shares = [accuracy] if isinstance(accuracy, int | float) else list(accuracy)
        if not shares or not all(0.0 <= share <= 1.0 for share in shares):
            raise EngineError(f"engine_options.accuracy: {accuracy} must be between 0 and 1, or a list of such numbers")
        self._tokens = np.array([token for token in tokens if token not in (end_id, reward_token)], np.int64)
        if not len(self._tokens):
            raise EngineError("paced engine: the vocabulary has no token beside the end and reward tokens")
        self._end_id, self._reward_token, self._accuracies = end_id, reward_token, shares
        self._max_sequences, self._rate = max_sequences, tokens_per_second
        self._least_seconds = 1.0 / single if single is not None else 0.0
        """Least seconds between two tokens of one rollout."""
        self._lengths, self._shortest, self._longest = lengths, shortest, longest
        self._waiting: deque[RolloutRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._clock = 0  # tokens made so far by each of the running rollouts, since the start
        self._keys: set[str] = set()
        self._aborted: set[str] = set()
        self._owed = 0.0
        self._prints: dict[str, str] = {}
        self._generated = self._prompt_tokens = self._aborted_tokens = self._finished_count = self._aborted_count = 0
        self._busy_seconds = 0.0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        require_version(self.version)
        keys = [request.key for request in requests]
        for key in keys:
            if key in self._keys:
                raise EngineError(f"request {key}: already in flight; give each rollout its own index")
        self._keys.update(keys)
        self._waiting.extend(requests)

    def abort(self, keys: Iterable[str]) -> None:
        self._aborted.update(key for key in keys if key in self._keys)

    @property
    def in_flight(self) -> int:
        return len(self._keys)

    def step(self) -> list[Rollout]:
        require_open(self.closed, "step")
        started = time.perf_counter()
        finished = self._take_aborted()
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting.popleft()
            length = min(self._length(request), request.sampling.max_tokens)
            ends = self._clock + length
            self._running[request.key] = _Running(request, length, ends, time.monotonic(), self.version)
            self._prompt_tokens += len(request.prompt_ids)
        if self._running:
            self._advance()
            for running in list(self._running.values()):
                if running.ends <= self._clock:
                    del self._running[running.request.key]
                    finished.append(self._rollout(running, running.length))
        self._busy_seconds += time.perf_counter() - started
        return finished

    def _advance(self) -> None:
        """Everyone makes tokens until the next one finishes, or for some milliseconds if that is later."""
        rows = len(self._running)
        nearest = min(running.ends for running in self._running.values()) - self._clock
        seconds = max(rows / self._rate, self._least_seconds)
        count = max(1, min(nearest, int(0.005 / seconds)))
        self._clock += count
        self._generated += count * rows
        self._owed += count * seconds
        if self._owed >= MIN_SLEEP:
            before = time.perf_counter()
            time.sleep(self._owed)
            self._owed = max(-0.05, self._owed - (time.perf_counter() - before))

    def _length(self, request: RolloutRequest) -> int:
        u = float(self._numbers(request, 1, 0)[0])
        if self._lengths == "uniform":
            return self._shortest + int(u * (self._longest - self._shortest + 1))
        mean = max(1.0, (self._longest - self._shortest) / 2)
        return min(self._longest, self._shortest + int(-mean * math.log1p(-u)))

    def _numbers(self, request: RolloutRequest, count: int, first: int) -> np.ndarray:
        seed, group = request.sampling.seed, request.group
        key = np.full(count, stream_key(seed, group, request.index, request.start), np.uint64)
        return uniforms(key, np.arange(first, first + count, dtype=np.int64))

    def _rollout(self, running: _Running, made: int) -> Rollout:
        """`made` of the `length` tokens of a rollout."""
        request, length, _, began, version = running
        numbers = self._numbers(request, length, 2)
        ids = self._tokens[(numbers * len(self._tokens)).astype(np.int64)]
        accuracy = self._accuracies[request.group.row % len(self._accuracies)]
        if self._reward_token is not None and float(self._numbers(request, 1, 1)[0]) < accuracy:
            ids[0] = self._reward_token
        full = length == request.sampling.max_tokens
        if not full:
            ids[-1] = self._end_id
        if made < length or not length:
            reason = FinishReason.ABORT
            self._aborted_count += 1
            self._aborted_tokens += made
        else:
            reason = FinishReason.LENGTH if full else FinishReason.STOP
            self._finished_count += 1
        self._keys.discard(request.key)
        logprobs = [-math.log(len(self._tokens))] * made if request.sampling.logprobs else None
        return Rollout(
            group=request.group,
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=ids[:made].tolist(),
            logprobs=logprobs,
            finish_reason=reason,
            first_version=version,
            last_version=self.version,
            seconds=time.monotonic() - began,
        )

    def _take_aborted(self) -> list[Rollout]:
        keys, self._aborted = self._aborted & self._keys, set()
        rollouts = []
        for key in keys & self._running.keys():
            running = self._running.pop(key)
            rollouts.append(self._rollout(running, running.length - (running.ends - self._clock)))
        for request in [request for request in self._waiting if request.key in keys]:
            self._waiting.remove(request)
            rollouts.append(
                self._rollout(_Running(request, self._length(request), 0, time.monotonic(), self.version), 0)
            )
        return rollouts

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        temperature: float,  # noqa: ARG002
    ) -> list[list[float]]:
        return [[-math.log(len(self._tokens))] * len(completion) for _, completion in sequences]

    def rescore(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        if not self.closed:
            fill_logprobs(self, rollouts, temperature)

    def receive(self, update: WeightUpdate) -> None:
        prints: dict[str, str] = {}

        def take(tensors: list[tuple[TensorSpec, torch.Tensor]]) -> None:
            prints.update((spec.name, fingerprint(tensor)) for spec, tensor in tensors)

        with self._receiving(update, take):
            self._prints = prints

    def fingerprints(self) -> dict[str, str]:
        return dict(self._prints)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
            aborted_tokens=self._aborted_tokens,
            finished=self._finished_count,
            aborted=self._aborted_count,
            kv_cache_usage=len(self._running) / self._max_sequences,
            busy_seconds=self._busy_seconds,
        )

    def close(self) -> None:
        self.closed = True
        self.disconnect()
        self._keys.clear()
        self._running.clear()
        self._waiting.clear()
