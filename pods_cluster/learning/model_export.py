"""Export of the policy in Hugging Face format, with LoRA merged into the weights and alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from pods_cluster.learning.forward import unwrap_peft
from pods_cluster.learning.policy_model import load_tokenizer
from pods_cluster.learning.rank_checkpoint import commit
from pods_cluster.learning.savable_config import savable_generation_config
from pods_cluster.learning.trainer import Trainer
from pods_cluster.weights.protocol import plan_buckets
from pods_cluster.weights.transport import first_line


def export(trainer: Trainer, folder: Path, bucket_bytes: int = 1 << 28) -> list[str]:
    """Write the model to `folder`: safetensors, config, tokenizer with its chat template. Returns what a person should
    know of it: settings that had to be changed, parts that could not be written.

    Collective; rank 0 writes. With LoRA the weights are merged, and the adapter alone is written below `adapter/`.
    """
    specs = trainer.model_weights.specs()
    state: dict[str, Tensor] = {}
    for start, stop in plan_buckets(specs, bucket_bytes):
        tensors = trainer.model_weights.gather(start, stop)
        for spec, tensor in zip(specs[start:stop], tensors, strict=False):
            state[spec.name] = tensor.detach().to("cpu", copy=True)
    adapter = _gather_adapter(trainer)
    if trainer.rank != 0:
        return []
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    core = cast(Any, unwrap_peft(trainer.engine.policy.model))
    core.generation_config, changed = savable_generation_config(core.generation_config)
    notes = [changed] if changed else []
    try:
        if adapter is None:
            core.save_pretrained(partial, state_dict=state)
        else:
            _save_merged(trainer, partial, state)
    except Exception as error:
        notes.append(_save_plainly(trainer, partial, state, error))
    if adapter is not None:
        peft_model = cast(Any, trainer.engine.policy.model)
        peft_model.save_pretrained(partial / "adapter", state_dict=adapter)
    try:
        load_tokenizer(trainer.config.model).save_pretrained(partial)
    except Exception as error:  # the weights must not be lost over it
        notes.append(f"the tokenizer is not beside the model ({first_line(error)}); copy it from model.path")
    commit(partial, folder)
    return notes


def _save_plainly(trainer: Trainer, folder: Path, state: dict[str, Tensor], error: Exception) -> str:
    """Write the weights without transformers, beside the settings of `model.path`: the training must not be lost.

    Raises what safetensors raises, with `error` as its context.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    source = Path(trainer.config.model.path).expanduser()
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    return f"transformers refused to save the model ({first_line(error)}): its weights are written without it"


def _save_merged(trainer: Trainer, folder: Path, state: dict[str, Tensor]) -> None:
    """Write the merged weights under the names of the plain model, by a model without adapters."""
    from transformers import AutoModelForCausalLM

    core = cast(Any, unwrap_peft(trainer.engine.policy.model))
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(core.config, trust_remote_code=trainer.config.model.trust_remote_code)
    plain.generation_config = core.generation_config
    plain.save_pretrained(folder, state_dict=state)


def _gather_adapter(trainer: Trainer) -> dict[str, Tensor] | None:
    """Adapter parameters by PEFT's names, on the CPU; None without LoRA. Collective under ZeRO-3."""
    if trainer.config.learner.lora is None:
        return None
    named = [(name, p) for name, p in trainer.engine.policy.model.named_parameters() if "lora_" in name]
    if trainer.config.learner.zero_stage != 3:
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}
    import deepspeed

    with cast(Any, deepspeed).zero.GatheredParameters([p for _, p in named], modifier_rank=None):
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}
