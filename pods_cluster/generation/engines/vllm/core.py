"""vLLM's engine core (scheduler and model), as this engine drives it.

The engine talks to the core past vLLM's `LLM` class and its output processor: token ids and log-probabilities come as the
core made them, without the text, the statistics and the dictionary a token that vLLM's front end builds for each sequence
in each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pods_cluster.generation.engines.vllm import compat, process_owner

log = logging.getLogger(__name__)


class Core:
    """The engine core: in this process, or in one of its own (`process`). One thread calls it.

    `arguments` are those of vLLM's `EngineArgs`. With `fast_decode` it gets our scheduler (`scheduler`), where the
    arguments name none.
    """

    def __init__(self, arguments: dict[str, Any], *, process: bool, fast_decode: bool = True) -> None:
        config = compat.EngineArgs(**arguments).create_engine_config(compat.UsageContext.LLM_CLASS)
        self.process = process
        self.max_model_len = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.world_size = int(config.parallel_config.world_size)
        self.async_scheduling = bool(config.scheduler_config.async_scheduling)
        self.runner = "v2" if config.use_v2_model_runner and compat.on_gpu() else "v1"
        if fast_decode and config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = _scheduler_class(self.async_scheduling)
        with process_owner.owning(process):
            self._client: Any = compat.EngineCoreClient.make_client(
                multiprocess_mode=process,
                asyncio_mode=False,
                vllm_config=config,
                executor_class=compat.Executor.get_class(config),
                log_stats=not arguments.get("disable_log_stats", False),
            )
        # In a process of its own the cache is sized there.
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self.cache_tokens = int(blocks) * int(size) if blocks and size else None
        self.config = config

    def add(self, request: Any) -> None:
        """Queue a request (`requests.make_request`)."""
        self._client.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests early; nothing more comes of them."""
        self._client.abort_requests(request_ids)

    def step(self) -> tuple[Sequence[Any], Any]:
        """Outputs of one step and the scheduler's gauges (None without statistics).

        With a process of its own it blocks until a step ends: only call it while requests are in flight.
        """
        outputs = self._client.get_output()
        return outputs.outputs, outputs.scheduler_stats

    def pause(self) -> Iterator[tuple[Sequence[Any], Any]]:
        """Schedule nothing more; yields the outputs of steps that were on their way. Requests are kept."""
        self._client.sleep(0, "keep")
        if self.process:
            # They came over the same socket before the answer to `sleep`.
            while not self._client.outputs_queue.empty():
                yield self.step()
            return
        core = self._client.engine_core
        while core.batch_queue:
            yield self.step()

    def resume(self, *, keep_cache: bool = False) -> None:
        """Go on after `pause`, with nothing cached that older weights computed: running requests start again at
        their first token's keys and values. `keep_cache`: as if there had been no pause."""
        if not keep_cache:
            self._client.reset_prefix_cache(True, False)
        self._client.wake_up(["scheduling"])

    def call_workers(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """The method's result on every worker of the engine."""
        return self._client.collective_rpc(method, timeout, args, None)

    def close(self) -> None:
        """End the core, and its processes."""
        self._client.shutdown()


def _scheduler_class(asynchronous: bool) -> str | None:
    try:
        from pods_cluster.generation.engines.vllm import scheduler
    except ImportError as error:
        log.warning("this vLLM's scheduler is not the one that ours builds on (%s): its own is used, slower", error)
        return None
    compat.accept_other_schedulers()
    return scheduler.class_name(asynchronous)
