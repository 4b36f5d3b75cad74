"""Saving of a run: its checkpoints, and the one that is left when the learner group is lost while its size changes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.learning.reports import LearnerError, StorageError
from pods_cluster.run import checkpoints
from pods_cluster.run.checkpoints import RunState
from pods_cluster.run.errors import RunError
from pods_cluster.run.stages import Learners
from pods_cluster.sizing.pools import Notice
from pods_cluster.telemetry.run_folder import RunFolder

RETRY_SECONDS = 60.0
"""After a checkpoint that the disk did not take, the next one that is due by `run.checkpoint.minutes` waits so long."""
REPEAT_SECONDS = 300.0
"""While checkpoints fail, an attempt after so many seconds is told again."""


class Saver:
    """Writes checkpoints of a run when they are due, at most one for each step. The disk is worked on by a thread.

    A disk that does not take a checkpoint costs this one, not the run: it is told, and the next that is due is tried.
    """

    def __init__(self, config: Config, learners: Learners, folder: RunFolder, notice: Notice) -> None:
        self._settings, self._keep = config.run.checkpoint, config.run.checkpoint.keep
        self._learners, self._folder, self._notice = learners, folder, notice
        self.saved_step: int | None = None
        """The step of the newest checkpoint, or of the one that the run was resumed from."""
        self._saved_at = time.monotonic()
        self._failed = 0
        self._failed_at = self._told_at = -math.inf
        self._cause = ""
        self._export_notes: set[str] = set()

    def resumed_from(self, step: int | None) -> None:
        """The run goes on from this step's checkpoint, which needs no other; None: from a state without one."""
        self.saved_step = step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, by `run.checkpoint.every` or by `run.checkpoint.minutes`."""
        every, minutes = self._settings.every, self._settings.minutes
        now = time.monotonic()
        late = bool(minutes) and now - self._saved_at >= 60 * minutes and now - self._failed_at >= RETRY_SECONDS
        return bool(every and step % every == 0) or late

    def metrics(self) -> dict[str, float]:
        """`checkpoint/failed` while checkpoints fail."""
        return {"checkpoint/failed": float(self._failed)} if self._failed else {}

    async def save(self, state: RunState) -> None:
        """Write the checkpoint of this state, unless its step has one. Raises LearnerError."""
        if self.saved_step == state.step:
            return
        try:
            path = await self._write(state)
        except (StorageError, OSError) as error:
            self._tell_failed(state, error)
            return
        after = f" after {self._failed} that failed" if self._failed else ""
        self.saved_step, self._saved_at, self._failed = state.step, time.monotonic(), 0
        self._told_at = -math.inf
        self._notice("checkpoint", f"saved {path.name}{after}")

    async def save_last(self, state: RunState, model: Path | None) -> None:
        """Write the checkpoint that the run ends with, and the model to `model`. Raises RunError where the disk does not
        take one of them.
        """
        await self.save(state)
        if self.saved_step != state.step:
            raise RunError(
                f"the last checkpoint, of step {state.step}, could not be written to {self._folder.checkpoints} "
                f"({self._cause}); {self._newest()}. Free space or raise the quota, then go on by --resume"
            )
        if model is None:
            return
        try:
            await self.export(model)
        except (StorageError, OSError) as error:
            raise RunError(
                f"the model could not be written to {model} ({_cause_of(error)}); {self._newest()}, with the same model in "
                f"it. Free space, then --resume writes it"
            ) from None

    async def _write(self, state: RunState) -> Path:
        """Write a checkpoint; one that fails leaves nothing behind."""
        temporary = checkpoints.temporary_folder(self._folder.checkpoints, state.step)
        try:
            await asyncio.to_thread(checkpoints.begin, self._folder.checkpoints, state.step)
            await self._learners.save(temporary / "learner")
            await self.export(temporary / "model")
            return await asyncio.to_thread(checkpoints.finish, temporary, state, self._keep)
        except (StorageError, OSError):
            await asyncio.to_thread(checkpoints.discard, temporary)
            raise

    def _tell_failed(self, state: RunState, error: Exception) -> None:
        now = time.monotonic()
        self._failed, self._failed_at, self._cause = self._failed + 1, now, _cause_of(error)
        if now - self._told_at < REPEAT_SECONDS:
            return
        self._told_at = now
        self._notice(
            "checkpoint_failed",
            f"the checkpoint of step {state.step} could not be written to {self._folder.checkpoints} ({self._cause}; "
            f"{self._failed} failed in a row); training goes on, {self._newest()}. Free space or raise the quota; the next "
            f"one that is due is tried",
            level="warning",
        )

    def _newest(self) -> str:
        newest = checkpoints.latest(self._folder.checkpoints)
        return "there is no checkpoint yet" if newest is None else f"the newest checkpoint is {newest.name}"

    async def export(self, path: Path) -> None:
        """Write the model in Hugging Face format; people are told once what had to be changed for it."""
        for note in await self._learners.export(path):
            if note not in self._export_notes:
                self._export_notes.add(note)
                self._notice("model_changed", note, level="warning")

    async def save_if_lost(self, state: RunState, resize: Callable[[Path], Awaitable[None]]) -> None:
        """Run `resize`, which carries the learner's state through the folder that it is given.

        When it raises LearnerError, no group works any more: what lies in the folder becomes a checkpoint to resume
        from, unless the step has one, and the error is raised again.
        """
        temporary = checkpoints.temporary_folder(self._folder.checkpoints, state.step)
        with contextlib.suppress(OSError):  # the ranks find it out too, and the group keeps its size
            await asyncio.to_thread(checkpoints.begin, self._folder.checkpoints, state.step)
        try:
            await resize(temporary / "learner")
        except LearnerError:
            if (temporary / "learner").is_dir() and self.saved_step != state.step:
                path = await asyncio.to_thread(checkpoints.finish, temporary, state, self._keep)
                self._notice("checkpoint", f"saved {path.name} before the learner group was lost; --resume goes on")
            raise
        await asyncio.to_thread(checkpoints.discard, temporary)


def _cause_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
