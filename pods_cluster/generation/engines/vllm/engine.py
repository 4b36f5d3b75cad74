"""The vLLM engine: every rollout a request of its own, driven step by step, kept across weight updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from pods_cluster.generation.engine import (
    COUNTS,
    EngineError,
    EngineStats,
    check_request,
    fill_logprobs,
    require_open,
    require_version,
)
from pods_cluster.generation.engines.sampling import stream_key
from pods_cluster.generation.engines.vllm.arguments import VllmOptions
from pods_cluster.generation.engines.vllm.core import Core
from pods_cluster.generation.engines.vllm.prefill_scores import Scoring
from pods_cluster.generation.engines.vllm.requests import (
    RunningRequest,
    decoded,
    finish_reason,
    make_params,
    make_request,
    preempted,
    sampled_logprobs,
)
from pods_cluster.generation.engines.vllm.worker_calls import WorkerWeights
from pods_cluster.generation.stop_strings import StopStringsByRequest
from pods_cluster.types import FinishReason, Rollout, RolloutRequest
from pods_cluster.weights.protocol import Invitation, WeightUpdate

log = logging.getLogger(__name__)

# Share of the rollouts in flight that must lose their place within so many seconds for a warning.
_STORM = 0.5
_WARN_SECONDS = 60.0


class VllmEngine:
    """`Engine` over a vLLM core. `end_ids` end a completion; each request may add its own.

    `tokenizer`: for requests with stop strings. `keep_cache`: rollouts in flight keep their keys and values over an update.
    """

    fingerprints_beside = False

    def __init__(
        self,
        core: Core,
        options: VllmOptions,
        end_ids: Sequence[int],
        max_sequences: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        keep_cache: bool = False,
    ) -> None:
        self.version = -1
        self.closed = False
        self.options = options
        self._core = core
        self._end_ids = tuple(end_ids)
        self._max_sequences = max_sequences
        self._stop_strings = StopStringsByRequest(tokenizer)
        self._by_key: dict[str, RunningRequest] = {}
        self._by_id: dict[str, RunningRequest] = {}
        self._finished: list[Rollout] = []
        self._serial = 0
        self._keep_cache = keep_cache
        self._scoring = Scoring(core, self._request_id, self._advance)
        self._weights = WorkerWeights(core, native=options.transfer == "native", loading=options.loading)
        self._gauges: Any = None
        self._counts = dict.fromkeys(COUNTS, 0)
        self._busy_seconds = 0.0
        self._warned = (time.monotonic(), 0)

    # Requests.

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        require_version(self.version)
        prompts: dict[tuple[int, ...], list[int]] = {}
        keys: set[str] = set()
        for request in requests:
            check_request(
                request,
                self._core.max_model_len,
                self._core.vocabulary,
                limit="engine's length",
                remedy=", or raise generator.engine_options.max_model_len (up to the model's context)",
            )
            if request.key in self._by_key or request.key in keys:
                raise EngineError(f"request {request.key}: already in flight; give each rollout its own index")
            keys.add(request.key)
        stops = [self._stop_strings.of(request.sampling.stop_strings) for request in requests]
        for request, stop_strings in zip(requests, stops, strict=True):
            sampling = request.sampling
            seed = None
            if self.options.seeded == "per_request":
                seed = stream_key(sampling.seed, request.group, request.index, request.start) >> 1
            wanted = sampling.logprobs and self.options.logprobs == "engine"
            params = make_params(sampling, (*self._end_ids, *sampling.stop_token_ids), seed, wanted)
            running = RunningRequest(request, self._request_id(request.key), wanted, self.version, stop_strings)
            prompt = prompts.setdefault(request.prompt_ids, list(request.prompt_ids))
            # Where the cache is kept, a prompt that older weights read is not taken from it.
            salt = f"version {self.version}" if self._keep_cache else None
            self._core.add(make_request(running.request_id, prompt, params, salt))
            self._by_key[request.key] = self._by_id[running.request_id] = running

    def abort(self, keys: Iterable[str]) -> None:
        found = [running for key in keys if (running := self._by_key.get(key)) is not None]
        self._core.abort([running.request_id for running in found])
        for running in found:
            self._end(running, FinishReason.ABORT)

    @property
    def in_flight(self) -> int:
        return len(self._by_key) + len(self._finished)

    def step(self) -> list[Rollout]:
        require_open(self.closed, "step")
        if self._by_key and not self._finished:
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    def _request_id(self, name: str) -> str:
        self._serial += 1
        return f"{name}#{self._serial}"

    # One step.

    def _advance(self) -> bool:
        """One step of the core; whether anything came of it."""
        started = time.perf_counter()
        try:
            outputs, gauges = self._core.step()
        except Exception as error:
            raise EngineError(
                f"vLLM failed in a step: {type(error).__name__}: {error}; "
                "if memory ran out, lower generator.max_sequences or generator.engine_options.gpu_memory_utilization"
            ) from error
        self._take(outputs, gauges)
        self._busy_seconds += time.perf_counter() - started
        return len(outputs) > 0

    def _take(self, outputs: Sequence[Any], gauges: Any) -> None:
        if gauges is not None:
            self._gauges = gauges
        counts, version = self._counts, self.version
        for output in outputs:
            running = self._by_id.get(output.request_id)
            if running is None:
                if (many := decoded(output)) is None:
                    self._scoring.take(output)
                else:
                    self._take_decoded(*many)
                continue
            if new := output.new_token_ids:
                if not running.token_ids:
                    running.first_version = version
                    counts["prompt_tokens"] += len(running.request.prompt_ids)
                running.last_version = version
                running.token_ids += new
                counts["generated_tokens"] += len(new)
                if running.logprobs is not None and output.new_logprobs is not None:
                    running.logprobs += sampled_logprobs(output)
            if output.events and preempted(output):
                counts["preemptions"] += not running.preempted_by_update
                running.preempted_by_update = False
            if new and self._ended_by_a_string(running):
                continue
            if output.finish_reason is not None:
                self._end(running, finish_reason(str(output.finish_reason)))
        self._warn()

    def _take_decoded(
        self, ids: list[str], tokens: list[int], logprobs: list[float] | None, ended: dict[str, str]
    ) -> None:
        """The tokens of rollouts that were on their way already; one that was aborted meanwhile is not known here."""
        by_id, version = self._by_id, self.version
        for index, name in enumerate(ids):
            running = by_id.get(name)
            if running is None:
                continue
            running.token_ids.append(tokens[index])
            running.last_version = version
            if logprobs is not None and running.logprobs is not None:
                running.logprobs.append(logprobs[index])
            self._counts["generated_tokens"] += 1
            self._ended_by_a_string(running)
        for name, reason in ended.items():
            if (running := by_id.get(name)) is not None:
                self._end(running, finish_reason(reason))

    def _ended_by_a_string(self, running: RunningRequest) -> bool:
        """End a rollout whose last token completes a stop string: the core knows no text, and would go on."""
        if not running.ends_in_a_string:
            return False
        self._core.abort([running.request_id])
        self._end(running, FinishReason.STOP)
        return True

    def _end(self, running: RunningRequest, reason: FinishReason) -> None:
        del self._by_key[running.request.key], self._by_id[running.request_id]
        if reason is FinishReason.ABORT:
            self._counts["aborted"] += 1
            self._counts["aborted_tokens"] += len(running.token_ids)
        else:
            self._counts["finished"] += 1
        self._finished.append(running.rollout(reason))

    def _warn(self) -> None:
        """Tell people of a cache too small for what is in flight: rollouts that lose their place are computed again."""
        since, before = self._warned
        now = time.monotonic()
        if now - since < _WARN_SECONDS:
            return
        lost = self._counts["preemptions"] - before
        self._warned = (now, self._counts["preemptions"])
        if lost > _STORM * max(1, len(self._by_key)):
            log.warning(
                "%d rollouts lost their place in the key/value cache in %.0f s (%d in flight, cache %.0f %% full) and "
                "are computed again: lower generator.max_sequences (now %d), raise "
                "generator.engine_options.gpu_memory_utilization, or set kv_cache_dtype: fp8",
                lost,
                now - since,
                len(self._by_key),
                100 * getattr(self._gauges, "kv_cache_usage", 0.0),
                self._max_sequences,
            )

    # Scoring given completions.

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """See `Engine.score` and `Scoring.score`. Rollouts that finish meanwhile come from the next `step`."""
        require_open(self.closed, "score")
        return self._scoring.score(sequences, temperature)

    def rescore(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """See `Engine.rescore`; does nothing unless `engine_options.logprobs` is `rescore`."""
        if self.options.logprobs == "rescore" and not self.closed:
            fill_logprobs(self, rollouts, temperature, longest=self._core.max_model_len - 1)

    # Weights.

    def adopt_version(self, version: int) -> None:
        require_open(self.closed, "adopt_version")
        self.version = version

    def connect(self, invitation: Invitation) -> None:
        self._weights.connect(invitation)

    def disconnect(self) -> None:
        self._weights.disconnect()

    def stage(self, update: WeightUpdate, *, check_memory: bool = True) -> bool:
        return self._weights.stage(update, check_memory=check_memory)

    def receive(self, update: WeightUpdate) -> None:
        self._weights.check(update)
        self.closed = True
        for outputs, gauges in self._core.pause():
            self._take(outputs, gauges)  # still of the version before
        self._weights.receive(update)
        for running in self._by_id.values():
            recomputed = running.updated(self.version, keep_cache=self._keep_cache)
            self._counts["recomputed_tokens"] += recomputed
        self._core.resume(keep_cache=self._keep_cache)
        self.version = update.version
        self.closed = False

    def fingerprints(self) -> dict[str, str]:
        require_open(self.closed, "fingerprints")
        return self._weights.fingerprints()

    def stats(self) -> EngineStats:
        running = getattr(self._gauges, "num_running_reqs", min(len(self._by_key), self._max_sequences))
        running = min(running, len(self._by_key))
        return EngineStats(
            running=running,
            waiting=len(self._by_key) - running,
            kv_cache_usage=getattr(self._gauges, "kv_cache_usage", 0.0) if self._by_key else 0.0,
            busy_seconds=self._busy_seconds,
            **self._counts,
        )

    def close(self) -> None:
        self.closed = True
        self.disconnect()
        self._by_key.clear()
        self._by_id.clear()
        self._finished.clear()
        self._core.close()
