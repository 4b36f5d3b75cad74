"""Checkpoints of a rank's training state: weights, optimiser, random streams."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from pods_cluster.learning import fragment_files
from pods_cluster.learning.fragments import Fragment, ShardedState
from pods_cluster.learning.trainer import Trainer

FORMAT = 2
"""Version of the layout below; a checkpoint of another one is refused."""
META_FILE = "learner.json"
TAG = "state"
"""DeepSpeed's name for the optimiser state of a group that is not `resizable`."""


class LearnerCheckpointError(Exception):
    """A checkpoint that is missing, incomplete, or of another model or optimiser."""


def save(trainer: Trainer, folder: Path, world_size: int) -> None:
    """Write this rank's part into `folder`; all ranks call it with the same folder, on storage that they share."""
    meta = _meta(trainer, world_size)
    if trainer.config.learner.resizable:
        folder.mkdir(parents=True, exist_ok=True)
        state = ShardedState(trainer.engine.engine)
        fragment_files.write_fragments(folder, trainer.rank, state.fragments())
        meta |= _meta_of_shards(state)
    else:
        _save_by_deepspeed(trainer, folder)
    _write_rest(folder, trainer.rank, meta, _random_state())


@dataclass(frozen=True, slots=True)
class TakenState:
    """A rank's part of a checkpoint in memory, as it was when it was taken."""

    rank: int
    meta: dict[str, Any]
    fragments: list[Fragment]
    random: dict[str, Any]


def take(trainer: Trainer, world_size: int, memory: dict[str, Float[Tensor, " numel"]]) -> TakenState:
    """Copy this rank's part of a checkpoint to `memory`, by `sizes`; what is not there yet is added.

    The copy holds good until the next one into the same memory. Only where the group is `resizable`: the state is by
    parameters then.
    """
    state = ShardedState(trainer.engine.engine)
    meta = _meta(trainer, world_size) | _meta_of_shards(state)

    def copied(fragment: Fragment, kind: str, tensor: Float[Tensor, " numel"]) -> Float[Tensor, " numel"]:
        name = fragment.piece(kind)
        held = memory.get(name)
        if held is None or held.shape != tensor.shape:
            held = memory[name] = torch.empty(tensor.shape, dtype=torch.float32)
        return held.copy_(tensor.detach())

    copies = [
        replace(fragment, tensors={kind: copied(fragment, kind, tensor) for kind, tensor in fragment.tensors.items()})
        for fragment in state.fragments()
    ]
    return TakenState(trainer.rank, meta, copies, _random_state())


def sizes(trainer: Trainer) -> dict[str, int]:
    """Number of elements of each piece of this rank's state, by the name that `take` knows it by."""
    found = ShardedState(trainer.engine.engine).fragments()
    return {fragment.piece(kind): tensor.numel() for fragment in found for kind, tensor in fragment.tensors.items()}


def write(state: TakenState, folder: Path) -> None:
    """Write what was taken into `folder`, as `save` does. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    fragment_files.write_fragments(folder, state.rank, state.fragments)
    _write_rest(folder, state.rank, state.meta, state.random)


def _save_by_deepspeed(trainer: Trainer, folder: Path) -> None:
    """Have DeepSpeed write, whose ranks meet while they do: what a disk does not take is raised once all have met."""
    faults: list[Exception] = []

    def noting(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            try:
                return write(*args, **named)
            except Exception as error:
                if storage_fault(error) is None:
                    raise
                faults.append(error)

        return call

    engine = trainer.engine.engine
    writer: Any = engine.checkpoint_engine
    with ExitStack() as stack:
        for owner, name in ((writer, "makedirs"), (writer, "save"), (engine, "_copy_recovery_script")):
            setattr(owner, name, noting(getattr(owner, name)))
            stack.callback(delattr, owner, name)  # the class's own is there again
        trainer.engine.save(str(folder), TAG)
    if faults:
        raise faults[0]


def _meta(trainer: Trainer, world_size: int) -> dict[str, Any]:
    learner = trainer.config.learner
    return {
        "format": FORMAT,
        "world_size": world_size,
        "zero_stage": learner.zero_stage,
        "lora": learner.lora is not None,
        "optimizer": learner.optimizer,
    }


def _meta_of_shards(state: ShardedState) -> dict[str, Any]:
    return {"steps": state.steps, "scaler": state.loss_scale(), "shapes": state.shapes}


def _write_rest(folder: Path, rank: int, meta: dict[str, Any], random_state: dict[str, Any]) -> None:
    torch.save(random_state, folder / f"random-{rank}.pt")
    if rank == 0:
        (folder / META_FILE).write_text(json.dumps(meta), encoding="utf-8")


def commit(partial: Path, final: Path) -> None:
    """Rename a folder that all ranks have written to `final`, which afterwards holds all of it, or what it held before."""
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


def storage_fault(error: BaseException) -> str | None:
    """The disk's fault as a text, if this failure of writing a file is its fault; None for any other failure.

    torch and safetensors tell of a full disk by errors of their own.
    """
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError) or (isinstance(error, RuntimeError) and _TORCH_WRITER.search(text)):
        return text
    return None


_TORCH_WRITER = re.compile(
    r"PytorchStreamWriter|inline_container|unexpected pos|File .* cannot be opened|Parent directory"
)


def load(trainer: Trainer, folder: Path, world_size: int) -> None:
    """Read what `save` wrote; the number of ranks and the ZeRO stage may be others. Raises LearnerCheckpointError."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LearnerCheckpointError(f"{folder}: no learner checkpoint ({error})") from error
    _require_equal(folder, "format", meta.get("format"), FORMAT)
    learner = trainer.config.learner
    _require_equal(folder, "learner.lora", meta["lora"], learner.lora is not None)
    try:
        if learner.resizable and "shapes" in meta:
            _load_fragments(trainer, folder, meta)
        else:
            _require_equal(folder, "learner.optimizer", meta["optimizer"], learner.optimizer)
            _require_equal(folder, "learner.workers", meta["world_size"], world_size)
            _require_equal(folder, "learner.zero_stage", meta["zero_stage"], learner.zero_stage)
            trainer.engine.load(str(folder), TAG)
        if meta["world_size"] == world_size:  # another number of ranks has no use for these streams
            _restore_random_state(_read_random_state(folder / f"random-{trainer.rank}.pt"))
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
    with fragment_files.FragmentReader(folder) as reader:
        state.set(reader.read, int(meta["steps"]))
    state.set_loss_scale(meta["scaler"])


def _require_equal(folder: Path, name: str, saved: Any, now: Any) -> None:
    if saved != now:
        raise LearnerCheckpointError(
            f"{folder}: was saved with {name}: {saved}, this run has {now}; resume with {saved}"
        )


def _random_state() -> dict[str, Any]:
    """States of all random streams of this process, in types that can be read without running code from the file."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _read_random_state(path: Path) -> dict[str, Any]:
    """Read what `_random_state` saved. A pickle in it may hold data alone: a checkpoint that was copied from elsewhere runs
    nothing. Raises LearnerCheckpointError.
    """
    # Checkpoints of the first versions hold numpy's array of keys.
    array = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.empty(0).__reduce__()[0]]
    try:
        with torch.serialization.safe_globals(array):
            return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        told = str(error).splitlines()[0]
        raise LearnerCheckpointError(
            f"{path}: holds more than random states ({told}); give another checkpoint"
        ) from None


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
