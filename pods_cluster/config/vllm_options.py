"""`generator.engine_options` for vLLM: options of our own, and options of vLLM that cannot be set here.

Names that vLLM does not know are refused where it can be imported (`generation.engines.vllm.arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Arguments of vLLM that follow from other settings of the run.
_ELSEWHERE = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "hf_overrides": "model.overrides",
    "tensor_parallel_size": "generator.tensor_parallel",
    "max_num_seqs": "generator.max_sequences",
    "seed": "run.seed",
}
_FIXED = {
    "skip_tokenizer_init": "the engine works on token ids",
    "generation_config": "sampling is what the run says",
    "override_generation_config": "sampling is what the run says",
    "logprobs_mode": "the learner needs them at the sampling temperature",
    "weight_transfer_config": "it is chosen by generator.engine_options.transfer",
    "worker_extension_cls": "weights arrive through it",
    "data_parallel_size": "use generator.workers",
    "pipeline_parallel_size": "use generator.tensor_parallel",
    "runner": "the engine generates",
    "speculative_config": "draft models hold weights that no update reaches",
    "stream_interval": "rollouts are returned when they end",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """`generator.engine_options` that are ours and not vLLM's.

    `process`: the engine core in a process of its own. `logprobs`: of sampled tokens with each step (`engine`), of kept
    rollouts by a second look (`rescore`), or left to the learner (`none`). `seeded`: one stream a rollout
    (`per_request`), or one for the engine (`engine`; a rollout cannot be made again then). `transfer`: our transfer
    engine or vLLM's own (`native`, NCCL only). `loading` of new weights and adapters: straight into the model's storage where
    that was proven at the first update (`auto`), or by vLLM's own loaders always (`reload`). `scheduler`: vLLM's with our fast
    path for decoding (`pods`), or vLLM's alone (`vllm`). `admit`: free places that new rollouts wait for beside decoding
    ones; `auto`: see `admission_portion`. `kv_cache_gb`: the key/value cache's size.
    """

    process: bool = False
    logprobs: str = "engine"
    seeded: str = "per_request"
    transfer: str = "pods"
    loading: str = "auto"
    scheduler: str = "pods"
    admit: int | str = "auto"
    kv_cache_gb: float | None = None


_CHOICES = {
    "process": (True, False),
    "logprobs": ("engine", "rescore", "none"),
    "seeded": ("per_request", "engine"),
    "transfer": ("pods", "native"),
    "loading": ("auto", "reload"),
    "scheduler": ("pods", "vllm"),
}


def split_options(options: Mapping[str, Any], temperature: float) -> tuple[VllmOptions, dict[str, Any]]:
    """Split options into our own and those for vLLM. Raises ValueError with the option, its value and the fix."""
    own: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for name, value in options.items():
        label = f"generator.engine_options.{name}: {value!r}"
        if name in VllmOptions.__dataclass_fields__:
            if name in _CHOICES and (value not in _CHOICES[name] or type(value) is not type(_CHOICES[name][0])):
                raise ValueError(f"{label} must be one of {', '.join(map(str, _CHOICES[name]))}")
            if name == "kv_cache_gb" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
                raise ValueError(f"{label} must be a number above 0")
            if name == "admit" and value != "auto" and (type(value) is not int or value < 1):
                raise ValueError(f"{label} must be auto, or a number of places from 1 on (1: as they come free)")
            own[name] = value
        elif name in _ELSEWHERE:
            raise ValueError(f"{label} cannot be set here; set {_ELSEWHERE[name]}")
        elif name in _FIXED:
            raise ValueError(f"{label} cannot be set: {_FIXED[name]}")
        else:
            passed[name] = value
    found = VllmOptions(**own)
    if found.logprobs == "rescore" and temperature != 1.0:
        raise ValueError(
            "generator.engine_options.logprobs: rescore needs generator.temperature: 1.0 (vLLM reports the "
            f"log-probabilities of given tokens untempered), not {temperature:g}; use engine or none"
        )
    if found.admit != "auto" and found.scheduler != "pods":
        raise ValueError(
            f"generator.engine_options.admit: {found.admit} needs scheduler: pods, as vLLM's own fills every place at "
            "once; leave one of them out"
        )
    if "kv_cache_memory_bytes" in passed and found.kv_cache_gb is not None:
        raise ValueError("generator.engine_options: kv_cache_gb and kv_cache_memory_bytes say the same; leave one out")
    return found, passed
