"""Checkpoints of a run on disk: complete or absent, newest kept.

    <run>/checkpoints/step-000020/
        learner/      weights, optimiser, schedule and random streams, as DeepSpeed writes them
        model/        the same weights in Hugging Face format, for `pods eval` and for use elsewhere
        state.json    step, weight version, prompt stream, ledger, totals, and size and checksum of every other file; written last

A checkpoint is built under a temporary name and renamed, so that a folder without `.tmp` was whole once. What a disk or a
copy did to it since is found by its checksums before a run goes on from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
FORMAT = 1
TEMPORARY = ".tmp"
OLD = ".old"
BROKEN = ".broken"
"""Ending of a checkpoint's folder that was refused: it counts no more."""
_PLACES = threading.Lock()
"""Held while a checkpoint gets its place, and while the newest is looked for: a thread that writes one goes on when the task
that waits for it is cancelled."""
_READ_BYTES = 1 << 22
_READERS = 8
"""Threads that compute checksums; zlib computes outside of Python's lock."""


class CheckpointError(Exception):
    """A checkpoint that is missing, incomplete or of another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The content of `state.json`: all that a run goes on with beside what its learner saves.

    `stream` and `ledger` are states of the prompt stream and of the staleness ledger. `attempts` are [epoch, row, count]
    of rows that were tried and not trained, `given_up` rows that are left out as they ended every engine, `silent` rows
    whose last groups had no signal (`PromptHistory.state`), `revisit` the chances with which those are tried, where they
    adapt, `pass_rates` the past of the curriculum (`Curriculum.state`).
    `seconds` the run has worked, and trained on `trained_tokens` of prompts and completions; `rollouts_per_prompt` is the n
    that it chose last (None: a checkpoint from before it could choose).
    """

    step: int
    version: int
    seconds: float = 0.0
    trained_tokens: int = 0
    seed: int = 0
    stream: Mapping[str, Any]
    ledger: Mapping[str, Any]
    attempts: list[list[int]]
    given_up: list[int] = field(default_factory=list)
    silent: list[list[int]] = field(default_factory=list)
    revisit: list[float] = field(default_factory=list)
    pass_rates: list[list[float]] = field(default_factory=list)
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
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def latest(folder: Path, copies: Path | None = None) -> Path | None:
    """The newest whole checkpoint, or light copy in `copies`, or None."""
    found = [*(completed(copies) if copies is not None else ()), *completed(folder)]
    return max(found, key=_step_of, default=None)


def temporary_folder(folder: Path, step: int) -> Path:
    """Folder in which the checkpoint of a step is written before it is moved to its place."""
    return folder / f"{name_of(step)}{TEMPORARY}"


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into."""
    path = temporary_folder(folder, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def finish(temporary: Path, state: RunState, keep: int) -> Path:
    """Write the state, put the checkpoint in place and remove the oldest beyond `keep`."""
    with _PLACES:
        final = temporary.with_suffix("")
        files = {name: [size, checksum] for name, (size, checksum) in _checksums(temporary).items()}
        with (temporary / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(state), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        old = final.with_name(final.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():  # a kill from here on leaves the temporary one, which is whole: `_tidy` finds it
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        for old in completed(final.parent)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final


def discard(temporary: Path) -> None:
    """Remove a folder of `begin`."""
    shutil.rmtree(temporary, ignore_errors=True)


def remove_all(folder: Path) -> None:
    """Remove a folder of checkpoints, also while one is put in its place there."""
    with _PLACES:
        shutil.rmtree(folder, ignore_errors=True)


def newest_sound(folder: Path, copies: Path | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and what is wrong with those after it, which are put aside.

    `copies`: a folder of light copies, which count as checkpoints.

    Raises CheckpointError where there are checkpoints and none is sound; all stay in place then.
    """
    with _PLACES:
        wrong: list[tuple[Path, str]] = []
        for each in (folder, copies):
            if each is not None:
                _tidy(each)
        there = [*completed(folder), *(completed(copies) if copies is not None else ())]
        for path in sorted(there, key=_step_of, reverse=True):
            fault = fault_of(path)
            if fault is None:
                for broken, _ in wrong:
                    aside = broken.with_name(broken.name + BROKEN)
                    shutil.rmtree(aside, ignore_errors=True)
                    broken.rename(aside)
                return path, [text for _, text in wrong]
            wrong.append((path, fault))
        if wrong:
            told = "; ".join(text for _, text in wrong)
            raise CheckpointError(f"{folder}: no checkpoint is whole ({told}); copy one back, or begin the run anew")
        return None, []


def _tidy(folder: Path) -> None:
    """Put a checkpoint in place that was whole when its run was killed, and remove what was not; nobody writes there now."""
    for path in folder.glob(f"step-*{TEMPORARY}"):
        final = path.with_suffix("")
        if (path / STATE_FILE).is_file() and not final.exists() and fault_of(path) is None:
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"step-*{OLD}"):
        shutil.rmtree(path, ignore_errors=True)


def fault_of(path: Path) -> str | None:
    """The fault of a checkpoint, with the name of the file; None if all files are as they were written.

    One from before checksums were written passes by its state alone.
    """
    try:
        tree = _read(path)
        _state_of(path, tree)
    except CheckpointError as error:
        return str(error)
    noted = tree.get("files")
    if noted is None:
        return None
    for name, (size, _) in noted.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes, {size:,} were written"
    try:
        found = _checksums(path)
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror or error})"
    changed = [name for name, (_, checksum) in noted.items() if found[name][1] != checksum]
    return f"{path / changed[0]} has other bytes than were written" if changed else None


def _checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file in a checkpoint but its state, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / STATE_FILE)
    with ThreadPoolExecutor(_READERS) as pool:
        sums = pool.map(_checksum, files)
        return {path.relative_to(folder).as_posix(): found for path, found in zip(files, sums, strict=True)}


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return size, checksum


def read_state(path: Path) -> RunState:
    """Read the state of a whole checkpoint. Raises CheckpointError."""
    return _state_of(path, _read(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error}); give a folder step-… of a run") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {found}, this version reads {FORMAT}")
    return state


def _state_of(path: Path, state: Mapping[str, Any]) -> RunState:
    try:
        return RunState(**{field.name: state[field.name] for field in fields(RunState) if field.name in state})
    except TypeError as error:
        raise CheckpointError(f"{path / STATE_FILE}: a value is missing ({error}); give another checkpoint") from error
