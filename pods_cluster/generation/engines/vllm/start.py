"""Starting vLLM: one at a time on a shared card, and failures that say what to change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.vllm import compat

_MEMORY = "generator.engine_options.gpu_memory_utilization"


def start_core(arguments: dict[str, Any], *, process: bool, shared_card: bool, short_way: bool = True) -> compat.Core:
    """The running core. Raises EngineError that names the cause and the setting to change."""
    measures = shared_card and "kv_cache_memory_bytes" not in arguments
    with _alone() if measures else contextlib.nullcontext():
        try:
            return compat.Core(arguments, process=process, short_way=short_way)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(describe(error, arguments, process)) from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """vLLM sizes its cache by what memory goes while it starts: engines that share a card start one after the other
    (unless they were told the size: `engine_options.kv_cache_gb`)."""
    cards = re.sub(r"[^A-Za-z0-9-]+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))[:64]
    path = Path(tempfile.gettempdir()) / f"pods-vllm-start-{os.getuid()}-{cards}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def describe(error: BaseException, arguments: dict[str, Any], process: bool) -> str:
    """What kept vLLM from starting, with its own numbers, and what to change."""
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
