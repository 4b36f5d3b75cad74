"""Choice of how the learner computes: the decoder's kernels, and whether its micro-batches are packed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from pods_cluster.config import Config, LearnerConfig
from pods_cluster.learning.forward import Policy, unwrap_peft
from pods_cluster.learning.policy_model import ModelError

Kernels = Literal["liger", "compile", "plain"]
_INSTALL = "install it with pip install 'pods-cluster[gpu]'"


def choose_kernels(model: nn.Module, config: LearnerConfig) -> tuple[Kernels, str]:
    """The kernels for `learner.kernels`, and why: `auto` takes Liger's where they are installed and know the model.

    Raises ModelError for `liger` where they cannot be used.
    """
    if config.kernels in ("plain", "compile"):
        return cast(Kernels, config.kernels), "as configured"
    hindrance = _liger_hindrance(model)
    if hindrance is None:
        return (
            "liger",
            "as configured" if config.kernels == "liger" else "liger-kernel is installed and knows the model",
        )
    if config.kernels == "liger":
        raise ModelError(f"learner.kernels: liger is not possible: {hindrance}; or set learner.kernels: auto")
    return "plain", hindrance


def _liger_hindrance(model: nn.Module) -> str | None:
    if not torch.cuda.is_available():
        return "Liger's kernels need a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed; {_INSTALL}"
    kind = _model_type(model)
    if kind not in _liger().MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel has none for model type {kind!r}"
    return None


def apply_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Change the decoder's layers in place. The output layer and the loss stay as they are.

    Raises ModelError if the model has no list of layers to compile.
    """
    core = cast(Any, unwrap_peft(model))
    if kernels == "liger":
        _liger()._apply_liger_kernel_to_instance(core, cross_entropy=False, fused_linear_cross_entropy=False)
    elif kernels == "compile":
        layers = getattr(core.get_decoder(), "layers", None) if hasattr(core, "get_decoder") else None
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(
                f"learner.kernels: compile finds no list of layers in {type(core).__name__}; set learner.kernels: plain"
            )
        for layer in layers:
            layer.compile(dynamic=True)


def _liger() -> Any:
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it warns of back ends for other hardware
    from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

    return monkey_patch


def _model_type(model: nn.Module) -> str:
    return str(getattr(cast(Any, unwrap_peft(model)).config, "model_type", ""))


def choose_packing(policies: Sequence[Policy], config: Config) -> tuple[bool, str]:
    """Whether `learner.packing` gives packed micro-batches, and why; the policies' attention is changed for them.

    All `policies` (the trained one, and the reference if there is one) take the same batches. They must not be
    partitioned yet. Raises ModelError if `on` is not possible.
    """
    packing = config.learner.packing
    if packing == "off":
        return False, "as configured"
    hindrance = _packing_hindrance(policies, config)
    if hindrance is None:
        return True, "as configured" if packing == "on" else "packed sequences give the model's own log-probabilities"
    if packing == "on":
        raise ModelError(f"learner.packing: on is not possible: {hindrance}; set learner.packing: auto")
    return False, hindrance


def _packing_hindrance(policies: Sequence[Policy], config: Config) -> str | None:
    if config.learner.packing == "auto":
        if config.model.attention != "sdpa":
            return f"model.attention is {config.model.attention}, and packing brings its own"
        if torch.cuda.is_available() and config.model.dtype == "float32":
            return "FlashAttention, which makes it fast on a GPU, has no float32"
    longest = config.data.max_prompt_tokens + config.generator.max_tokens
    for policy in policies:
        core = cast(Any, unwrap_peft(policy.model))
        text = core.config.get_text_config() if hasattr(core.config, "get_text_config") else core.config
        kinds = set(getattr(text, "layer_types", None) or ("sliding_attention",))
        other = sorted(kinds - {"full_attention", "sliding_attention"})
        if other:
            return f"the model has layers of type {other[0]}"
        window = getattr(text, "sliding_window", None)
        if window is not None and "sliding_attention" in kinds and window < longest:
            return f"the model attends to {window} tokens back, and sequences have up to {longest}"
    return next((reason for policy in policies if (reason := policy.enable_packing()) is not None), None)
