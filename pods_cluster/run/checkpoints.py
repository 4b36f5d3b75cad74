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
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that is missing, incomplete or of another format."""


def name_of(step: int) -> str:
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


def finish(temporary: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the state, put the checkpoint in place and remove the oldest beyond `keep`."""
    final = temporary.with_suffix("")
    with (temporary / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **state}, file, indent=1)
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


def read_state(path: Path) -> dict[str, Any]:
    """The state of a whole checkpoint. Raises CheckpointError."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error}); give a folder step-… of a run") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {state.get('format')}, this version reads {FORMAT}")
    return state
