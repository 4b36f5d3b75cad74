"""Saving of a run: its checkpoints, and the one that is left when the learner group is lost while its size changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.learning.reports import LearnerError
from pods_cluster.run import checkpoints
from pods_cluster.run.checkpoints import RunState
from pods_cluster.run.stages import Learners
from pods_cluster.sizing.pools import Notice
from pods_cluster.telemetry.run_folder import RunFolder


class Saver:
    """Writes checkpoints of a run when they are due, at most one for each step. The disk is worked on by a thread."""

    def __init__(self, config: Config, learners: Learners, folder: RunFolder, notice: Notice) -> None:
        self._settings, self._keep = config.run.checkpoint, config.run.checkpoint.keep
        self._learners, self._folder, self._notice = learners, folder, notice
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._export_notes: set[str] = set()

    def resumed_from(self, step: int) -> None:
        """The run goes on from this step's checkpoint: it needs no other."""
        self._saved_step = step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, by `run.checkpoint.every` or by `run.checkpoint.minutes`."""
        every, minutes = self._settings.every, self._settings.minutes
        waited = time.monotonic() - self._saved_at
        return bool(every and step % every == 0) or bool(minutes and waited >= 60 * minutes)

    async def save(self, state: RunState) -> None:
        """Write the checkpoint of this state, unless its step has one. Raises LearnerError."""
        if self._saved_step == state.step:
            return
        temporary = await asyncio.to_thread(checkpoints.begin, self._folder.checkpoints, state.step)
        await self._learners.save(temporary / "learner")
        await self.export(temporary / "model")
        path = await asyncio.to_thread(checkpoints.finish, temporary, state, self._keep)
        self._saved_step, self._saved_at = state.step, time.monotonic()
        self._notice("checkpoint", f"saved {path.name}")

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
        temporary = await asyncio.to_thread(checkpoints.begin, self._folder.checkpoints, state.step)
        try:
            await resize(temporary / "learner")
        except LearnerError:
            if (temporary / "learner").is_dir() and self._saved_step != state.step:
                path = await asyncio.to_thread(checkpoints.finish, temporary, state, self._keep)
                self._notice("checkpoint", f"saved {path.name} before the learner group was lost; --resume goes on")
            raise
        await asyncio.to_thread(checkpoints.discard, temporary)
