"""Checkpoints of a run on disk: complete or absent, newest kept.

    <run>/checkpoints/step-000020/
        learner/      weights, optimiser, schedule and random streams, as DeepSpeed writes them
        model/        the same weights in Hugging Face format, for `pods eval` and for use elsewhere
        state.json    step, weight version, prompt stream, ledger, totals; written last

A checkpoint is built under a temporary name and renamed, so that a folder without `.tmp` is always whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that is missing, incomplete or of another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The content of `state.json`: all that a run goes on with beside what its learner saves.

    `stream` and `ledger` are states of the prompt stream and of the staleness ledger. `attempts` are [epoch, row, count]
    of rows that were tried and not trained. `seconds` the run has worked, and trained on `trained_tokens` of prompts and
    completions; `rollouts_per_prompt` is the n that it chose last (None: a checkpoint from before it could choose).
    """

    step: int
    version: int
    seconds: float = 0.0
    trained_tokens: int = 0
    seed: int = 0
    stream: Mapping[str, Any]
    ledger: Mapping[str, Any]
    attempts: list[list[int]]
    rollouts_per_prompt: int | None = None


def name_of(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:06d}"


def completed(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name) and (path / STATE_FILE).is_file():
            found.append(path)
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = completed(folder)
    return found[-1] if found else None


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into."""
    path = folder / f"{name_of(step)}.tmp"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def finish(temporary: Path, state: RunState, keep: int) -> Path:
    """Write the state, put the checkpoint in place and remove the oldest beyond `keep`."""
    final = temporary.with_suffix("")
    with (temporary / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(state)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in completed(final.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def discard(temporary: Path) -> None:
    """Remove a folder of `begin`."""
    shutil.rmtree(temporary, ignore_errors=True)


def read_state(path: Path) -> RunState:
    """Read the state of a whole checkpoint. Raises CheckpointError."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error}); give a folder step-… of a run") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {found}, this version reads {FORMAT}")
    try:
        return RunState(**{field.name: state[field.name] for field in fields(RunState) if field.name in state})
    except TypeError as error:
        raise CheckpointError(f"{path / STATE_FILE}: a value is missing ({error}); give another checkpoint") from error
