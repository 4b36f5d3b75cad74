"""vLLM's inner interfaces: where they are, and how releases 0.25.1 to 0.33 differ in them.

The rule: no other module of this package imports from inside vLLM. Each takes the names that it needs from here
(`from ….compat import Scheduler`), and asks here about everything that is not the same in all releases, so that a new
release of vLLM is met in this file alone. tests/generation/engines/vllm/test_compat.py holds the package against the rule.

A name is looked up in vLLM when it is first used: importing this module needs no vLLM, costs nothing, and may come before
the environment is set that vLLM reads (`start.prepare_environment`). Where a release does not have a name, that first use
raises ImportError.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pods_cluster.weights.protocol import Invitation, WeightTransferError, WeightUpdate

if TYPE_CHECKING:  # what a type checker reads; the table below is what runs
    from vllm.config import set_current_vllm_config as set_current_vllm_config
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator as PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup as StatelessProcessGroup
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine as WeightTransferEngine
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo as WeightTransferInitInfo
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo as WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as NCCLWeightTransferEngine
    from vllm.engine.arg_utils import EngineArgs as EngineArgs
    from vllm.model_executor.layers.attention import Attention as Attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from vllm.model_executor.layers.linear import QKVParallelLinear as QKVParallelLinear
    from vllm.model_executor.layers.linear import RowParallelLinear as RowParallelLinear
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod as UnquantizedEmbeddingMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload as finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload as initialize_layerwise_reload
    from vllm.platforms import current_platform as current_platform
    from vllm.sampling_params import RequestOutputKind as RequestOutputKind
    from vllm.sampling_params import SamplingParams as SamplingParams
    from vllm.usage.usage_lib import UsageContext as UsageContext
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
    from vllm.v1.core.sched.utils import check_stop as check_stop
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as FullAttentionManager
    from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
    from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
    from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
    from vllm.v1.engine.core_client import EngineCoreClient as EngineCoreClient
    from vllm.v1.executor import Executor as Executor
    from vllm.v1.request import Request as Request
    from vllm.v1.request import RequestStatus as RequestStatus

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.config": ("set_current_vllm_config",),
    "vllm.distributed.device_communicators.pynccl": ("PyNcclCommunicator",),
    "vllm.distributed.utils": ("StatelessProcessGroup",),
    "vllm.distributed.weight_transfer": ("WeightTransferEngineFactory",),
    "vllm.distributed.weight_transfer.base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
    ),
    "vllm.distributed.weight_transfer.nccl_engine": ("NCCLWeightTransferEngine",),
    "vllm.engine.arg_utils": ("EngineArgs",),
    "vllm.model_executor.layers.attention": ("Attention",),
    "vllm.model_executor.layers.linear": (
        "ColumnParallelLinear",
        "QKVParallelLinear",
        "RowParallelLinear",
        "UnquantizedLinearMethod",
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "ParallelLMHead",
        "UnquantizedEmbeddingMethod",
        "VocabParallelEmbedding",
    ),
    "vllm.model_executor.model_loader.reload": ("finalize_layerwise_reload", "initialize_layerwise_reload"),
    "vllm.platforms": ("current_platform",),
    "vllm.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "vllm.usage.usage_lib": ("UsageContext",),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.core.sched.utils": ("check_stop",),
    "vllm.v1.core.single_type_kv_cache_manager": ("FullAttentionManager",),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequest"),
    "vllm.v1.engine.core_client": ("EngineCoreClient",),
    "vllm.v1.executor": ("Executor",),
    "vllm.v1.request": ("Request", "RequestStatus"),
}
"""Module of vLLM → names that are taken from it."""

_MODULE_OF = {name: module for module, names in NAMES.items() for name in names}


def lookup(name: str) -> Any:
    """One of `NAMES`. Raises ImportError where this release does not have it."""
    try:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    except AttributeError:
        raise ImportError(f"vLLM {release()} has no {name} in {_MODULE_OF[name]}") from None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = lookup(name)
        return value


def release() -> str:
    """vLLM's version. Raises what its import raises."""
    return str(importlib.import_module("vllm").__version__)


# Platforms and arguments.

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def on_gpu() -> bool:
    """Whether vLLM computes on a GPU here; its CPU build does not."""
    return not lookup("current_platform").is_cpu()


def cpu_head_sizes() -> tuple[int, ...]:
    """Head sizes of vLLM's CPU attention; with another one the engine's process ends without a word."""
    try:
        backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
        return tuple(backend.get_supported_head_sizes())
    except (ImportError, AttributeError):
        return _CPU_HEAD_SIZES


def engine_argument_names() -> tuple[str, ...]:
    """Names of vLLM's engine arguments."""
    return tuple(field.name for field in fields(lookup("EngineArgs")) if not field.name.startswith("_"))


# The scheduler.

RUNNING_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
"""Attributes of a scheduler that bound the running requests; a release has the first or both."""


def stale_tokens() -> Callable[[Any], int]:
    """Reads from a request how many results from before a pre-emption are still on their way."""
    early = "async_tokens_to_discard"  # vLLM 0.25
    return attrgetter(early if early in _attributes_of_request() else "num_stale_output_tokens")


def counts_tokens_in_flight() -> bool:
    """Whether a request counts its scheduled tokens in `num_in_flight_tokens`, which a scheduler must keep then."""
    return "num_in_flight_tokens" in _attributes_of_request()


def _attributes_of_request() -> tuple[str, ...]:
    return lookup("Request").__init__.__code__.co_names


def decodes_plainly(scheduler: Any) -> bool:
    """Whether a scheduler has one group of full-attention blocks, and none of the features that need more bookkeeping
    a step than a decoded token and its block. Raises AttributeError where this release's scheduler is another one."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        len(managers) == 1
        and type(managers[0]) is lookup("FullAttentionManager")
        and managers[0].block_size == scheduler.block_size
        and not (scheduler.connector or scheduler.ec_connector or scheduler.lora_config or scheduler.perf_metrics)
        and not (scheduler.use_pp or scheduler.is_encoder_decoder)
        and not (scheduler.num_spec_tokens or scheduler.num_lookahead_tokens)
        and not (scheduler.defer_block_free or getattr(scheduler.kv_cache_manager, "watermark_blocks", 0))
        and not getattr(scheduler, "enable_return_routed_experts", False)
        and getattr(scheduler, "aux_output_connector", None) is None
        and getattr(scheduler, "num_sampled_tokens_per_step", 1) == 1
        and scheduler.policy.name == "FCFS"
    )


def accept_other_schedulers() -> None:
    """vLLM warns of every scheduler that is not its own; not any more in this process."""
    logging.getLogger("vllm.config.scheduler").addFilter(_is_no_scheduler_warning)


def _is_no_scheduler_warning(record: logging.LogRecord) -> bool:
    return "custom scheduler class" not in record.msg


# Weight transfer.


def register_transfer_engine(backend: str, kind: type[WeightTransferEngine[Any, Any]]) -> None:
    """Make `kind` vLLM's transfer engine of that name; does nothing where the name is taken."""
    factory = lookup("WeightTransferEngineFactory")
    if backend not in factory._registry:
        factory.register_engine(backend, kind)


def leave_native_group(engine: Any) -> None:
    """Destroy the broadcast group of vLLM's own "nccl" transfer engine.

    Up to 0.27 its shutdown only drops the reference, and a stuck broadcast goes on for ever.
    """
    group, engine.model_update_group = getattr(engine, "model_update_group", None), None
    if group is not None:
        group.destroy()


# How vLLM's own "nccl" engine packs: up to 0.27 it is told with each update, from 0.28 on with the invitation.
_PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


def native_init_info(invitation: Invitation) -> dict[str, Any]:
    """An invitation as vLLM's own "nccl" transfer engine takes it. Raises WeightTransferError."""
    values: dict[str, Any] = {
        "master_address": invitation.host,
        "master_port": invitation.port,
        "rank_offset": invitation.rank,
        "world_size": invitation.world_size,
        **dict(zip(_PACKING, (True, invitation.bucket_bytes, 2), strict=True)),
    }
    return _known(lookup("NCCLWeightTransferEngine").init_info_cls, values)


def native_update_info(update: WeightUpdate, bucket_bytes: int) -> dict[str, Any]:
    """An update as vLLM's own "nccl" transfer engine takes it. Raises WeightTransferError."""
    values: dict[str, Any] = {
        "names": [spec.name for spec in update.tensors],
        "dtype_names": [spec.dtype for spec in update.tensors],
        "shapes": [list(spec.shape) for spec in update.tensors],
        **dict(zip(_PACKING, (True, bucket_bytes, 2), strict=True)),
    }
    return _known(lookup("NCCLWeightTransferEngine").update_info_cls, values)


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The items of `values` that a dataclass of this release has as fields."""
    names = {field.name for field in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if unknown := required - set(values):
        raise WeightTransferError(
            f"this vLLM's nccl transfer engine asks for {', '.join(sorted(unknown))}, which nobody here knows; use "
            "generator.engine_options.transfer: pods"
        )
    return {name: value for name, value in values.items() if name in names}
