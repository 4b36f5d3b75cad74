"""A rank's state on disk (weights, optimiser, random streams), and the model in Hugging Face format."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pods_cluster.learning import fragment_files
from pods_cluster.learning.checkpoint_format import FORMAT, META_FILE, divisible
from pods_cluster.learning.forward import inner
from pods_cluster.learning.fragments import ShardedState
from pods_cluster.learning.policy_model import load_tokenizer
from pods_cluster.learning.trainer import Trainer
from pods_cluster.weights.protocol import plan_buckets

TAG = "state"


class LearnerCheckpointError(Exception):
    """A checkpoint that is missing, incomplete, or of another model or optimiser."""


def save(trainer: Trainer, folder: Path, world_size: int) -> None:
    """Write this rank's part into `folder`; all ranks call it with the same folder, on storage that they share."""
    folder.mkdir(parents=True, exist_ok=True)
    learner = trainer.config.learner
    meta: dict[str, Any] = {
        "format": FORMAT,
        "world_size": world_size,
        "zero_stage": learner.zero_stage,
        "lora": learner.lora is not None,
        "optimizer": learner.optimizer,
    }
    if divisible(learner):
        state = ShardedState(trainer.engine.engine)
        fragment_files.write(folder, trainer.rank, state.fragments())
        meta |= {"steps": state.steps, "scaler": state.scaler(), "shapes": state.shapes}
    else:
        trainer.engine.save(str(folder), TAG)
    torch.save(_random_state(), folder / f"random-{trainer.rank}.pt")
    if trainer.rank == 0:
        (folder / META_FILE).write_text(json.dumps(meta), encoding="utf-8")


def commit(partial: Path, final: Path) -> None:
    """Put a checkpoint that all ranks have written in its place: afterwards `final` is whole, or what it was before."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def load(trainer: Trainer, folder: Path, world_size: int) -> None:
    """Read what `save` wrote, by any number of ranks of any ZeRO stage. Raises LearnerCheckpointError."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LearnerCheckpointError(f"{folder}: no learner checkpoint ({error})") from error
    _same(folder, "format", meta.get("format"), FORMAT)
    learner = trainer.config.learner
    _same(folder, "learner.lora", meta["lora"], learner.lora is not None)
    try:
        if divisible(learner) and "shapes" in meta:
            _load_fragments(trainer, folder, meta)
        else:
            _same(folder, "learner.optimizer", meta["optimizer"], learner.optimizer)
            _same(folder, "learner.workers", meta["world_size"], world_size)
            _same(folder, "learner.zero_stage", meta["zero_stage"], learner.zero_stage)
            trainer.engine.load(str(folder), TAG)
        if meta["world_size"] == world_size:  # with another number of ranks no stream is anyone's to go on with
            _restore_random_state(torch.load(folder / f"random-{trainer.rank}.pt", weights_only=False))
    except (OSError, fragment_files.MissingFragment) as error:
        raise LearnerCheckpointError(f"{folder}: incomplete learner checkpoint ({error})") from error


def _load_fragments(trainer: Trainer, folder: Path, meta: dict[str, Any]) -> None:
    state = ShardedState(trainer.engine.engine)
    saved = {name: tuple(shape) for name, shape in meta["shapes"].items()}
    if saved != state.shapes:
        name = min(saved.items() ^ state.shapes.items())[0]
        raise LearnerCheckpointError(
            f"{folder}: holds {name} as {saved.get(name, 'nothing')}, the model of this run as "
            f"{state.shapes.get(name, 'nothing')}; resume with the model.path and learner.lora that it was saved with"
        )
    with fragment_files.Reader(folder) as reader:
        state.set(reader.read, int(meta["steps"]))
    state.set_scaler(meta["scaler"])


def _same(folder: Path, name: str, saved: Any, now: Any) -> None:
    if saved != now:
        raise LearnerCheckpointError(
            f"{folder}: was saved with {name}: {saved}, this run has {now}; resume with {saved}"
        )


def export(trainer: Trainer, folder: Path, bucket_bytes: int = 1 << 28) -> None:
    """Write the model for use elsewhere: safetensors, config, tokenizer with its chat template.

    Collective. With LoRA the weights are merged, and the adapter alone is written below `adapter/`.
    """
    specs = trainer.weights.specs()
    state: dict[str, Tensor] = {}
    for start, stop in plan_buckets(specs, bucket_bytes):
        tensors = trainer.weights.gather(start, stop)
        for spec, tensor in zip(specs[start:stop], tensors, strict=False):
            state[spec.name] = tensor.detach().to("cpu", copy=True)
    adapter = _gather_adapter(trainer)
    if trainer.rank != 0:
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    core = cast(Any, inner(trainer.engine.policy.model))
    if adapter is None:
        core.save_pretrained(partial, state_dict=state)
    else:
        _save_merged(trainer, partial, state)
        peft_model = cast(Any, trainer.engine.policy.model)
        peft_model.save_pretrained(partial / "adapter", state_dict=adapter)
    load_tokenizer(trainer.config.model).save_pretrained(partial)
    commit(partial, folder)


def _save_merged(trainer: Trainer, folder: Path, state: dict[str, Tensor]) -> None:
    """The merged weights under the names of the plain model, which a model without adapters knows how to save."""
    from transformers import AutoModelForCausalLM

    core = cast(Any, inner(trainer.engine.policy.model))
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(core.config, trust_remote_code=trainer.config.model.trust_remote_code)
    plain.generation_config = core.generation_config
    plain.save_pretrained(folder, state_dict=state)


def _gather_adapter(trainer: Trainer) -> dict[str, Tensor] | None:
    """The adapters' parameters by PEFT's names, on rank 0; collective under ZeRO-3. None without LoRA."""
    if trainer.config.learner.lora is None:
        return None
    named = [(name, p) for name, p in trainer.engine.policy.model.named_parameters() if "lora_" in name]
    if trainer.config.learner.zero_stage != 3:
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}
    import deepspeed

    with cast(Any, deepspeed).zero.GatheredParameters([p for _, p in named], modifier_rank=None):
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
