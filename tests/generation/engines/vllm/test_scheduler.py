"""Our scheduler's fast path against vLLM's own scheduler: the same steps, the same blocks, the same results.

Both get the same requests, the same aborts and the same tokens; no model runs.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.law import law

vllm = pytest.importorskip("vllm", exc_type=ImportError)

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from pods_cluster.generation.engines.vllm import scheduler  # noqa: E402
from pods_cluster.generation.engines.vllm.admission import PORTION  # noqa: E402
from pods_cluster.generation.engines.vllm.requests import decoded, make_params  # noqa: E402
from pods_cluster.types import SamplingParams  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, LENGTH, SEQUENCES, BUDGET = 4, 48, 6, 24
END = 7
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Hidden:
    model: Path = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BUDGET,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
    ).create_engine_config()
    init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
    return Hidden(config)


class Hidden:
    """A value that hypothesis does not try to print: vLLM's configurations lack some of their fields."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Driver:
    """A scheduler with made-up tokens; `depth` steps are on their way at once."""

    def __init__(self, kind: type, hidden: Hidden, blocks: int, depth: int, second_runner: bool) -> None:
        config = hidden.value
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = second_runner
        self._hasher = get_request_block_hasher(
            BLOCK, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        )
        self._depth, self._turn = depth, 0
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = make_params(SamplingParams(max_tokens=max_tokens), (END,), 1, logprobs=True)
        request = Request(
            name, list(prompt), params, None, arrival_time=float(len(self.requests)), block_hasher=self._hasher
        )
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        """As the engine does for new weights: all steps have come back, every request starts again."""
        while self._queue:
            self.result()
        self.scheduler.reset_prefix_cache(True, False)

    def step(self) -> tuple[Any, Any]:
        """What was scheduled, and the oldest step's result once `depth` are on their way."""
        if not self.scheduler.has_requests():
            return None, self.result() if self._queue else None
        output = self.scheduler.schedule()
        self._queue.append((output, self._run(output)))
        shown = self._shown(output)
        return shown, self.result() if len(self._queue) >= self._depth else None

    def result(self) -> Any:
        output, result = self._queue.popleft()
        found: dict[str, Any] = {}
        for one in self.scheduler.update_from_output(output, result).get(0, _Nothing).outputs:
            if (many := decoded(one)) is None:
                values = one.new_logprobs.logprobs[:, 0].tolist() if one.new_logprobs else None
                reason = None if one.finish_reason is None else str(one.finish_reason)
                found[one.request_id] = (one.new_token_ids, values, reason)
            else:
                for name, token, value in zip(many[0], many[1], many[2] or (), strict=True):
                    found[name] = ([token], [value], many[3].get(name))
        return found, self.state()

    def _run(self, output: Any) -> ModelRunnerOutput:
        self._turn += 1
        names = list(output.num_scheduled_tokens)
        sampled = [
            [] if self.requests[name].is_prefill_chunk else [(crc32(name.encode()) + 5 * self._turn) % 32]
            for name in names
        ]
        table = np.array([[-float(index) - self._turn / 100] for index in range(len(names))], dtype=np.float32)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.zeros((len(names), 1), dtype=np.int32), table, np.zeros(len(names), dtype=np.int32)
            ),
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _shown(self, output: Any) -> dict[str, Any]:
        cached = output.scheduled_cached_reqs
        return {
            "scheduled": list(output.num_scheduled_tokens.items()),
            "total": output.total_num_scheduled_tokens,
            "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
            "cached": list(
                zip(
                    cached.req_ids,
                    cached.new_block_ids,
                    cached.num_computed_tokens,
                    cached.num_output_tokens,
                    strict=True,
                )
            ),
            "resumed": cached.resumed_req_ids,
            "all_tokens": cached.all_token_ids,
            "finished": output.finished_req_ids,
            "preempted": output.preempted_req_ids,
            "common": list(output.num_common_prefix_blocks),
        }

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "cached": sorted(map(repr, scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)),
            "requests": {
                name: (
                    request.status,
                    request.num_computed_tokens,
                    request.num_output_placeholders,
                    getattr(request, "num_in_flight_tokens", 0),
                    list(request.output_token_ids),
                    len(request.block_hashes),
                    request.stop_reason,
                )
                for name, request in self.requests.items()
            },
        }


class _Nothing:
    outputs = ()


PROMPTS = st.tuples(st.integers(1, 30), st.integers(1, 16), st.integers(0, 2))
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("reset"), st.none()),
)


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@law(250, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=4, max_size=24), blocks=st.sampled_from([14, 20, 90]))
def test_the_same_steps_and_results_as_vllms_scheduler(
    engine_config: Hidden, asynchronous: bool, second_runner: bool, actions: list[tuple[str, Any]], blocks: int
) -> None:
    kinds = (AsyncScheduler, scheduler.AsyncDecodeScheduler) if asynchronous else (Scheduler, scheduler.DecodeScheduler)
    theirs, ours = (Driver(kind, engine_config, blocks, 1 + asynchronous, second_runner) for kind in kinds)
    for action, value in [*actions, ("steps", 400)]:
        if action == "add":
            length, max_tokens, family = value
            name = f"request{len(ours.requests)}"
            for driver in (theirs, ours):
                driver.add(name, [(family + 3 * place) % 31 for place in range(length)], max_tokens)
        elif action == "abort" and value < len(ours.requests):
            for driver in (theirs, ours):
                driver.abort(f"request{value}")
        elif action == "reset":
            for driver in (theirs, ours):
                driver.reset()
        elif action == "steps":
            for _ in range(value):
                expected = theirs.step()
                assert ours.step() == expected
                if expected == (None, None):
                    break
        assert ours.state() == theirs.state()
    assert not ours.scheduler.has_requests()
    assert not ours.scheduler._steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoding_steps_take_the_fast_path(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only steps with a prefill chunk or too little room take vLLM's loops; admission goes along with decoding."""
    kind = scheduler.AsyncDecodeScheduler if asynchronous else scheduler.DecodeScheduler
    driver = Driver(kind, engine_config, 90, 1 + asynchronous, asynchronous)
    shared: list[int] = []
    take = driver.scheduler._take

    def counted(step: Any, result: Any) -> Any:
        found = take(step, result)
        shared.append(len(found.request_ids))
        return found

    monkeypatch.setattr(driver.scheduler, "_take", counted)
    for index in range(3):
        driver.add(f"early{index}", [1 + index] * 5, 12)
    for _ in range(4):
        driver.step()
    driver.add("late", [9] * 6, 8)
    while driver.scheduler.has_requests():
        driver.step()
    while driver._queue:
        driver.result()
    tokens = sum(len(request.output_token_ids) for request in driver.requests.values())
    assert sum(shared) == tokens - 4  # all but each one's first token


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_engine_admits_in_portions(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that end one by one: with a portion of 3 places the same work is admitted in fewer of the steps."""
    kind = scheduler.AsyncDecodeScheduler if asynchronous else scheduler.DecodeScheduler

    def admitting(portion: int) -> tuple[list[int], list[int]]:
        """How many were admitted in each step that admits, and the tokens of each request."""
        monkeypatch.setattr(engine_config.value, "additional_config", {PORTION: portion})
        driver = Driver(kind, engine_config, 90, 1 + asynchronous, asynchronous)
        for index in range(24):
            driver.add(f"request{index}", [1 + index] * 3, 4 + index % SEQUENCES)
        admitted = []
        while driver.scheduler.has_requests():
            shown, _ = driver.step()
            admitted.append(len(shown["new"]) if shown else 0)
        return [count for count in admitted if count], [r.num_output_tokens for r in driver.requests.values()]

    singly, _ = admitting(1)
    together, made = admitting(3)
    assert sum(singly) == sum(together) == 24
    assert len(together) < len(singly)
    assert all(count >= 3 for count in together[:-1])
    assert all(made)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollouts_that_start_again_are_not_cut_off_by_the_portion(
    engine_config: Hidden, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After new weights all that ran enter again, over as many steps as their tokens take."""
    monkeypatch.setattr(engine_config.value, "additional_config", {PORTION: 4})
    kind = scheduler.AsyncDecodeScheduler if asynchronous else scheduler.DecodeScheduler
    driver = Driver(kind, engine_config, 90, 1 + asynchronous, asynchronous)
    for index in range(SEQUENCES):
        driver.add(f"request{index}", [1 + index] * 8, 20)
    for _ in range(6):
        driver.step()
    driver.reset()
    waiting = [len(driver.scheduler.waiting)]
    assert waiting[0] > 4
    while waiting[-1] and len(waiting) < 9:
        driver.step()
        waiting.append(len(driver.scheduler.waiting))
    assert waiting[-1] == 0
    assert sorted(set(waiting), reverse=True) == waiting  # someone entered in each step
    assert len(waiting) > 2


def test_requests_that_need_more_go_vllms_way(engine_config: Hidden) -> None:
    driver = Driver(scheduler.DecodeScheduler, engine_config, 90, 1, False)
    driver.add("plain", [1, 2, 3], 6)
    driver.add("least", [4, 5, 6], 6)
    request = driver.requests["least"]
    assert request.sampling_params is not None
    request.sampling_params.min_tokens = 3
    request.fast_end_tokens = scheduler._end_tokens(request)  # type: ignore[attr-defined]
    assert request.fast_end_tokens is None  # type: ignore[attr-defined]
    while driver.scheduler.has_requests():
        driver.step()
        assert not driver.scheduler._steps
