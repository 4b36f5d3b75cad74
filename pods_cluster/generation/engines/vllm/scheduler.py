"""vLLM's scheduler with a fast path for requests that only decode, the bulk of a step with many rollouts in flight.

vLLM's own loops cost about 12 microseconds a sequence and step to schedule it and 10 more to take its token: 23 ms for
1,024 sequences of which the card needs 14 (3B) or 6 (0.5B). A running request that decodes one token and whose place in
its last block is free needs none of that work. Everything else (admission, prefills, pre-emption, whatever this file
does not know) is left to vLLM. The same steps come out: tests/generation/engines/vllm/test_scheduler.py compares them.
Beside decoding rollouts, new ones are admitted in portions (`admission`).

Requests of the fast path share one output a step, under `DECODED`; `requests.decoded` reads it.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.engines.vllm.admission import AdmissionGate, portion_of
from pods_cluster.generation.engines.vllm.compat import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    check_stop,
)

log = logging.getLogger(__name__)

DECODED = "decoded by the fast path"
"""Request id of the output that holds the tokens of many; real ids never look like it."""

_stale_tokens = compat.stale_tokens()

_Base = Scheduler if TYPE_CHECKING else object


def class_name(asynchronous: bool) -> str:
    """The name for `SchedulerConfig.scheduler_cls`."""
    kind = AsyncDecodeScheduler if asynchronous else DecodeScheduler
    return f"{kind.__module__}.{kind.__qualname__}"


class Decoded(NamedTuple):
    """One token for each of `request_ids`; `logprobs` where any of them asked; `ended`: finish reasons by id."""

    request_ids: list[str]
    tokens: list[int]
    logprobs: list[float] | None
    ended: dict[str, str]


class _Step(NamedTuple):
    output: Any
    """Kept, so that its identity stays its own until the step's result is there."""
    decoding: list[Request]
    others: dict[str, int]
    """Tokens that vLLM scheduled, by request id."""


class _Plan(NamedTuple):
    requests: list[Request]
    ids: list[str]
    computed: list[int]
    outputs: list[int]
    touched: list[int]
    """Positions of requests that need the block manager: a new block, or one to enter into the prefix cache."""


class _FastDecode(_Base):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: dict[int, _Step] = {}
        self._asynchronous = isinstance(self, AsyncScheduler)
        self._counts_in_flight = compat.counts_tokens_in_flight()
        self._gate = AdmissionGate(min(portion_of(self.vllm_config.additional_config), self.max_num_running_reqs))
        try:
            self._fast_decode = compat.decodes_plainly(self)
        except AttributeError as error:
            log.warning("this vLLM's scheduler is not the one that ours builds on (%s): no fast path", error)
            self._fast_decode = False

    def add_request(self, request: Request) -> None:
        request.fast_end_tokens = _end_tokens(request)  # type: ignore[attr-defined]
        super().add_request(request)

    # A step's plan.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._plan() if self._fast_decode else None
        if plan is None:
            return super().schedule(*args, **kwargs)
        new_blocks = self._allocate(plan)
        unseen = {} if self.use_v2_model_runner else self._unseen(plan)
        output = self._admit(len(plan.ids), *args, **kwargs)
        for request in plan.requests:
            request.num_computed_tokens += 1
        if self._asynchronous:
            for request in plan.requests:
                request.num_output_placeholders += 1
        if self._counts_in_flight:
            for request in plan.requests:
                request.num_in_flight_tokens += 1  # type: ignore[attr-defined]
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(plan.ids)
        others, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        output.num_scheduled_tokens = dict.fromkeys(plan.ids, 1) | others
        output.total_num_scheduled_tokens += len(plan.ids)
        cached.req_ids = plan.ids + cached.req_ids
        cached.new_block_ids = new_blocks + cached.new_block_ids
        cached.num_computed_tokens = plan.computed + cached.num_computed_tokens
        cached.num_output_tokens = plan.outputs + cached.num_output_tokens
        cached.all_token_ids = unseen | cached.all_token_ids
        if output.num_common_prefix_blocks:  # always empty in later releases
            common = self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0].request_id)
            output.num_common_prefix_blocks = common
        self._steps[id(output)] = _Step(output, plan.requests, others)
        return output

    def _plan(self) -> _Plan | None:
        """The running requests' next tokens; None where one of them is not between two tokens, or room is short."""
        running = self.running
        if not running or len(running) > self.max_num_scheduled_tokens or self._pause_state.name == "PAUSED_ALL":
            return None
        size, last, caches_here = self.block_size, self.max_model_len - 1, not self._asynchronous
        plan = _Plan([], [], [], [], [])
        requests, ids, computed_before, outputs, touched = plan
        starting = 0
        for request in running:
            if request.is_prefill_chunk or request.fast_end_tokens is None:  # type: ignore[attr-defined]
                return None
            computed, expected = request.num_computed_tokens, request.num_output_placeholders
            if expected and computed + 2 - expected >= request.num_prompt_tokens + request.max_tokens:
                continue  # a step on its way reaches max_tokens
            if len(request._all_token_ids) + expected - computed != 1:
                return None
            if computed >= last:
                continue
            place = computed % size
            if place == 0:
                starting += 1
                touched.append(len(ids))
            elif caches_here and place == size - 1:
                touched.append(len(ids))
            requests.append(request)
            ids.append(request.request_id)
            computed_before.append(computed)
            outputs.append(len(request._output_token_ids) + expected)
        if not ids or starting > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        return plan

    def _allocate(self, plan: _Plan) -> list[Any]:
        new_blocks: list[Any] = [None] * len(plan.ids)
        for position in plan.touched:
            blocks = self.kv_cache_manager.allocate_slots(plan.requests[position], 1, num_lookahead_tokens=0)
            if blocks is None:
                raise RuntimeError(f"no block for {plan.ids[position]} though some are free: a fault of this scheduler")
            new_blocks[position] = blocks.get_block_ids(allow_none=True)
        return new_blocks

    def _unseen(self, plan: _Plan) -> dict[str, list[int]]:
        """The first model runner is told all tokens of requests that were not in the step before."""
        before = self.prev_step_scheduled_req_ids
        return {
            request.request_id: request._all_token_ids.copy()
            for request in plan.requests
            if request.request_id not in before
        }

    def _admit(self, taken: int, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own step for what waits, within what `taken` decoding requests leave, if a portion of places is free."""
        running, self.running = self.running, []
        limits = [name for name in compat.RUNNING_LIMITS if hasattr(self, name)]
        before = {name: getattr(self, name) for name in (*limits, "max_num_scheduled_tokens")}
        free = self.max_num_running_reqs - len(running)
        opens = self._gate.opens(free)
        try:
            for name in limits:
                setattr(self, name, before[name] - len(running) if opens else 0)
            self.max_num_scheduled_tokens -= taken
            output = super().schedule(*args, **kwargs)
            self._gate.entered(free - len(self.running), len(self.waiting))
            return output
        finally:
            for name, value in before.items():
                setattr(self, name, value)
            self.running = running + self.running

    # A step's result.

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step = self._steps.pop(id(scheduler_output), None)
        if step is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        result = self._take(step, model_runner_output)
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = step.others
        outputs = super().update_from_output(rest, model_runner_output)
        if result.request_ids:
            shared = EngineCoreOutput(
                request_id=DECODED, new_token_ids=[], kv_transfer_params={"decoded": tuple(result)}
            )
            own = outputs.setdefault(0, EngineCoreOutputs())
            own.outputs = [shared, *own.outputs]
        return outputs

    def _take(self, step: _Step, result: Any) -> Decoded:
        """Give each decoding request its token; those that were interrupted are left to vLLM (`step.others`)."""
        sampled, rows, others = result.sampled_token_ids, result.req_id_to_index, step.others
        table = result.logprobs
        if not sampled or result.num_nans_in_logits or (table and table.cu_num_generated_tokens is not None):
            others.update((request.request_id, 1) for request in step.decoding)
            return Decoded([], [], None, {})
        column = table.logprobs[:, 0].tolist() if table else None
        ids: list[str] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        ended: dict[str, str] = {}
        stopped: list[Request] = []
        size, longest, running = self.block_size, self.max_model_len, RequestStatus.RUNNING
        asynchronous, counts = self._asynchronous, self._counts_in_flight
        for request in step.decoding:
            row = rows[request.request_id]
            if request.status is not running or len(sampled[row]) != 1 or _stale_tokens(request):
                others[request.request_id] = 1
                continue
            token = sampled[row][0]
            output, every = request._output_token_ids, request._all_token_ids
            output.append(token)
            every.append(token)
            if asynchronous:
                request.num_output_placeholders -= 1
            if counts:
                request.num_in_flight_tokens -= 1  # type: ignore[attr-defined]
            length = len(every)
            if length % size == 0:
                request.update_block_hashes()
            ids.append(request.request_id)
            tokens.append(token)
            if column is not None:
                logprobs.append(column[row])
            ends: frozenset[int] = request.fast_end_tokens  # type: ignore[attr-defined]
            if token in ends or length >= longest or len(output) >= request.max_tokens:
                check_stop(request, longest)
            if asynchronous:
                complete = request.num_computed_tokens - request.num_output_placeholders
                if complete % size == 0:
                    self.kv_cache_manager.cache_blocks(request, complete)
            if request.status is not running:
                ended[request.request_id] = str(request.get_finished_reason())
                stopped.append(request)
        self._end(stopped)
        return Decoded(ids, tokens, logprobs if column is not None else None, ended)

    def _end(self, stopped: list[Request]) -> None:
        for request in stopped:
            self._handle_stopped_request(request)
            self._free_request(request)
        if stopped:
            gone = set(stopped)
            self.running = [request for request in self.running if request not in gone]


class DecodeScheduler(_FastDecode, Scheduler):
    """The scheduler of engines that plan a step after the tokens of the last one have come."""


class AsyncDecodeScheduler(_FastDecode, AsyncScheduler):
    """The scheduler of engines that plan a step while the last one runs."""


def _end_tokens(request: Request) -> frozenset[int] | None:
    """Tokens that end a request; None where it needs more than this file does."""
    params = request.sampling_params
    if (
        not isinstance(params, SamplingParams)
        or request.use_structured_output
        or request.lora_request is not None
        or request.mm_features
        or request.resumable
        or request.client_index != 0
        or params.min_tokens
        or params.repetition_detection is not None
        or params.num_logprobs not in (None, 0)
    ):
        return None
    end = () if params.eos_token_id is None else (params.eos_token_id,)
    return frozenset([*end, *(params.stop_token_ids or ())])
