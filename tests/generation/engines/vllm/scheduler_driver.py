"""vLLM's scheduler and ours, driven with made-up requests and tokens: no model runs. It imports vLLM."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pods_cluster.generation.engines.vllm import scheduler
from pods_cluster.generation.engines.vllm.requests import decoded, make_params
from pods_cluster.types import SamplingParams

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

OURS: dict[bool, type] = {False: scheduler.DecodeScheduler, True: scheduler.AsyncDecodeScheduler}
"""Our scheduler, without and with steps that overlap."""
THEIRS: dict[bool, type] = {False: Scheduler, True: AsyncScheduler}


def make_config(folder: Path) -> Hidden:
    """vLLM's configuration for a model whose description is written into the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs(
        model=str(folder),
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
