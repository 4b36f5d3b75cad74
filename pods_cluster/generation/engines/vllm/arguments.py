"""vLLM's engine arguments from the configuration: what is ours to set, what the user may set, what cannot work."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from pods_cluster.config import Config
from pods_cluster.config.vllm_options import VllmOptions, split_options
from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.cache_memory import available_bytes
from pods_cluster.generation.engines.vllm import compat
from pods_cluster.generation.engines.vllm.admission import PORTION

GPU_SHARE = 0.9
"""Part of a card that one engine may fill, where it has the card for itself."""
PORTION_SHARE = 16
"""With `admit: auto` on a GPU a portion is one place in so many."""
CPU_CACHE_SHARE = 0.25


def read_options(config: Config) -> tuple[VllmOptions, dict[str, Any]]:
    """Our options and those that go to vLLM by name. Raises EngineError naming one that vLLM does not have."""
    options, passed = split_options(config.generator.engine_options, config.generator.temperature)
    known = compat.engine_argument_names()
    for name, value in passed.items():
        if name not in known:
            close = difflib.get_close_matches(name, [*VllmOptions.__dataclass_fields__, *known], n=1)
            raise EngineError(
                f"generator.engine_options.{name}: {value!r}: vLLM's engine has no such argument"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    return options, passed


def engine_arguments(config: Config, options: VllmOptions, passed: dict[str, Any], backend: str) -> dict[str, Any]:
    """All arguments for vLLM's `EngineArgs`. Raises EngineError for a model that cannot run here or at this length."""
    generator, gpu = config.generator, compat.on_gpu()
    model = _model_config(config)
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "revision": config.model.revision,
        "tokenizer_revision": config.model.revision,
        "hf_overrides": dict(config.model.overrides),
        "tensor_parallel_size": generator.tensor_parallel,
        # Left to itself vLLM takes the placement group of the actor that it runs in for its own.
        "distributed_executor_backend": "mp" if generator.tensor_parallel > 1 else "uni",
        "max_num_seqs": generator.max_sequences,
        "max_model_len": _length(config, model),
        "seed": config.run.seed % 2**31,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "enable_prefix_caching": True,
        "weight_transfer_config": {"backend": backend},
    }
    if gpu:
        part = min(1.0, generator.cards / generator.tensor_parallel)
        arguments["gpu_memory_utilization"] = round(GPU_SHARE * part, 4)
        theirs = {"enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"}
        if not theirs & set(passed):
            arguments["cudagraph_capture_sizes"] = capture_sizes(generator.max_sequences)
    else:
        _check_head_size(config, model)
        arguments["enforce_eager"] = True
        if options.seeded == "per_request":
            # A part of a prompt samples a token that is thrown away; a CPU's random stream cannot be wound back for it.
            arguments["enable_chunked_prefill"] = False
        if not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(passed):
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, model, arguments["max_model_len"])
    if options.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gb * 2**30)
    if options.scheduler == "pods":
        portion = {PORTION: admission_portion(options, generator.max_sequences, gpu)}
        passed = passed | {"additional_config": dict(passed.get("additional_config") or {}) | portion}
    return arguments | passed


def capture_sizes(sequences: int) -> list[int]:
    """Numbers of tokens for which a step's CUDA graphs are captured; vLLM's own end at 512.

    As fine as vLLM's for steps in which up to so many sequences decode, and coarser up to twice as many tokens for those
    that read prompts as well: without a graph each kernel of such a step is launched by itself.
    """
    fine = [1, 2, 4, *range(8, 256, 8), *range(256, sequences, 16)]
    stride = max(8, sequences // 32)
    return [*(size for size in fine if size < sequences), *range(sequences, 2 * sequences + 1, stride)]


def admission_portion(options: VllmOptions, max_sequences: int, gpu: bool) -> int:
    """Free places that new rollouts wait for: `admit`, or a share of all places on a GPU, and one on a CPU, whose steps
    cost the same with and without prompts."""
    if options.admit != "auto":
        return min(int(options.admit), max_sequences)
    return max(1, max_sequences // PORTION_SHARE) if gpu else 1


def end_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a completion: those of the generation config (or the model's), and the tokenizer's."""
    try:
        found = [
            GenerationConfig.from_pretrained(config.model.path, revision=config.model.revision or "main").eos_token_id
        ]
    except (OSError, ValueError):
        found = [None]
    if found[0] is None:
        found = [getattr(_model_config(config), "eos_token_id", None)]
    found.append(getattr(tokenizer, "eos_token_id", None))
    ids: set[int] = set()
    for item in found:
        ids.update([item] if isinstance(item, int) else item or ())
    return tuple(sorted(ids))


def _model_config(config: Config) -> Any:
    try:
        whole = AutoConfig.from_pretrained(
            config.model.path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            **config.model.overrides,
        )
    except Exception as error:
        raise EngineError(
            f"model.path: {config.model.path!r} holds no model configuration that can be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return whole.get_text_config(decoder=True)


def _length(config: Config, model: Any) -> int:
    """One more than the longest rollout where the model can: a whole rollout is then a prompt that can be scored."""
    longest = config.data.max_prompt_tokens + config.generator.max_tokens
    context = getattr(model, "max_position_embeddings", None)
    if context is None or longest < context:
        return longest + 1
    if longest > context and config.data.max_prompt_tokens >= context:
        raise EngineError(
            f"data.max_prompt_tokens: {config.data.max_prompt_tokens} leaves no room for a completion in the model's "
            f"context of {context}; lower it"
        )
    return context


def _check_head_size(config: Config, model: Any) -> None:
    size, sizes = _head_size(model), compat.cpu_head_sizes()
    if size not in sizes:
        raise EngineError(
            f"model.path: {config.model.path!r} has attention heads of size {size}; vLLM's CPU build computes sizes "
            f"{', '.join(map(str, sizes))}; use generator.engine: transformers"
        )


def _cpu_cache_bytes(config: Config, model: Any, length: int) -> int:
    """Room for all sequences in flight at full length, within a part of the memory that is free."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[config.model.dtype]
    token = 2 * model.num_hidden_layers * heads * _head_size(model) * width
    # The CPU's cache has blocks of 128 tokens; a whole one more for each sequence.
    wanted = (config.generator.max_sequences + 1) * (length + 128) * token
    return max(64 * 2**20, min(wanted, int(available_bytes() * CPU_CACHE_SHARE)))


def _head_size(model: Any) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
