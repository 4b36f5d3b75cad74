"""The arms of `engine.py`, and what its models' configurations share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Arm:
    """`engines` share the card, each with its part of the sequences."""

    about: str
    engines: int = 1
    front_end: bool = False
    logprobs: bool = False
    rescore: float = 0.0
    collect: bool = True
    options: dict[str, Any] = field(default_factory=dict)


ARMS: dict[str, Arm] = {
    "llm": Arm("vLLM's LLM class; groups are one request with n", front_end=True),
    "llm-logprobs": Arm("the same with logprobs=0", front_end=True, logprobs=True),
    "core": Arm("this engine: the core without vLLM's front end"),
    "core-logprobs": Arm("log-probabilities of every sampled token", logprobs=True),
    "core-vllm-scheduler": Arm("with vLLM's own scheduler", logprobs=True, options={"scheduler": "vllm"}),
    "core-rescore": Arm("log-probabilities of a quarter, by a second look", rescore=0.25),
    "core-unseeded": Arm("one random stream for the engine", options={"seeded": "engine"}),
    "core-sync": Arm("without asynchronous scheduling", options={"async_scheduling": False}),
    "core-graph512": Arm("graphs captured up to 512 sequences", options={"max_cudagraph_capture_size": 512}),
    "core-nostats": Arm("without the scheduler's statistics", options={"disable_log_stats": True}),
    "core-noprefix": Arm("without prefix caching", options={"enable_prefix_caching": False}),
    "core-nogc": Arm("without garbage collection", collect=False),
    "core-eager": Arm("without graphs", options={"enforce_eager": True}),
    "process": Arm("the core in a process of its own", options={"process": True}),
    "process-logprobs": Arm("the same with log-probabilities", logprobs=True, options={"process": True}),
}
for _count, _word in ((2, "two"), (3, "three"), (4, "four"), (6, "six"), (8, "eight")):
    ARMS[_word] = Arm(f"{_count} engines share the card", engines=_count)
    ARMS[f"{_word}-logprobs"] = Arm(f"{_count} engines, with log-probabilities", engines=_count, logprobs=True)
    ARMS[f"{_word}-vllm-scheduler"] = Arm(
        f"{_count} engines with vLLM's own scheduler", engines=_count, logprobs=True, options={"scheduler": "vllm"}
    )
    ARMS[f"{_word}-rescore"] = Arm(f"{_count} engines, a quarter scored again", engines=_count, rescore=0.25)
    ARMS[f"{_word}-process"] = Arm(f"{_count} engines, cores apart", engines=_count, options={"process": True})
