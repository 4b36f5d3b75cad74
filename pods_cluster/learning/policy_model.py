"""Loading of the policy from a Hugging Face folder: dtype, attention, adapters, parameter groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pods_cluster.config import LearnerConfig, LoraConfig, ModelConfig
from pods_cluster.learning.forward import unwrap_peft

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(Exception):
    """A model that cannot be loaded or trained as configured; the text names the field and the fix."""


def load_model(config: ModelConfig, path: str | None = None) -> PreTrainedModel:
    """Load the causal language model of `model.path` (or of `path`) on the CPU, without dropout.

    Dropout is off because a rollout's probability under the learner must be the one that the engine sampled from.
    Raises ModelError naming `model.path`, with the library's reason.
    """
    source = path or config.path

    def load(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            source,
            revision=config.revision if path is None else None,
            dtype=DTYPES[config.dtype],
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **(config.overrides if path is None else {}),
        )

    try:
        try:
            model, loaded = load(config.attention)
        except ValueError as error:
            # what says so has sinks or biases that torch's kernel does not know
            if config.attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
                raise
            model, loaded = load("eager")
    except Exception as error:  # what a broken config.json or its weights raise is of every kind
        told = (
            str(error) if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {error}"
        )
        raise ModelError(f"model.path: {source!r} cannot be loaded as a causal language model: {told}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(
            f"model.path: {source!r} has no weights for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''} "
            f"({len(missing)} in all), which would begin as random numbers; copy the model again"
        )
    if config.attention == "sdpa" and _caps_scores(model):
        model.set_attn_implementation("eager")  # torch's kernel would leave the cap out without a word
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return cast(PreTrainedModel, model)


def _caps_scores(model: PreTrainedModel) -> bool:
    """Whether the model's attention bounds its scores, as Gemma 2's does."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; `model.chat_template` (a template or a path to one), if given, replaces its own."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # what broken settings raise is of every kind
        raise ModelError(f"model.path: {config.path!r} has no tokenizer that loads: {error}") from error
    if config.chat_template is not None:
        template = config.chat_template
        if "{" not in template and "\n" not in template:
            template = Path(template).expanduser().read_text(encoding="utf-8")
        tokenizer.chat_template = template
    return cast(PreTrainedTokenizerBase, tokenizer)


def prepare_for_training(model: PreTrainedModel, config: LearnerConfig) -> nn.Module:
    """Add adapters and activation checkpointing as configured. Returns the module that is trained."""
    trained: nn.Module = model
    if config.lora is not None:
        trained = add_adapters(model, config.lora)
    if config.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ModelError(
                f"learner.gradient_checkpointing: true is not possible for {type(model).__name__}; set it to false"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained.train()
    return trained


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Add low-rank adapters (PEFT) to all linear layers but the output layer, or to those named.

    Raises ModelError for a target that does not exist, or whose weight another layer shares: an engine that is given
    merged weights would then change both layers, the learner only one.
    """
    import peft

    targets: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    shared = _shared_weights(model)
    try:
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=cast(int, lora.alpha),
                lora_dropout=lora.dropout,
                target_modules=targets,
                task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,
        )
    except ValueError as error:
        raise ModelError(f"learner.lora.target_modules: {lora.target_modules!r}: {error}") from error
    for name, module in unwrap_peft(adapted).named_modules():
        if hasattr(module, "lora_A") and id(cast(Any, module).get_base_layer().weight) in shared:
            raise ModelError(
                f"learner.lora.target_modules: {name} shares its weight with another layer (tied embeddings), so an "
                "adapter on it alone cannot be merged; leave it out"
            )
    return adapted


def _shared_weights(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups of the trainable parameters: matrices decay, vectors (norms and biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay, "name": "decay"},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def hidden_size(model: nn.Module) -> int:
    """Width of the model's residual stream, from its configuration."""
    config = cast(Any, unwrap_peft(model)).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "hidden_size", 1024))
