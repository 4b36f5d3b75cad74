"""Light copies of a run's state between its checkpoints: what failed is started again from the newest of both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.run import checkpoints
from pods_cluster.run.checkpoints import RunState
from pods_cluster.run.stages import Learners
from pods_cluster.sizing.pools import Notice

SHARE = 0.02
"""Most of the run's time that its ranks may spend on copies; the next one waits for that."""
LOOK_SECONDS = 0.2
RETRY_SECONDS = 60.0
"""Time to the next attempt where the folder cannot be made."""
WRITE_SECONDS = 600.0
"""After so long a copy that is not written is given up."""


class StateCopies:
    """Copies of the learner's state in `folder`, in the form of checkpoints without the model; the newest whole one stays.

    The ranks copy their state to memory between two steps, and write it while they go on. One copy is under way at a time.
    """

    def __init__(self, config: Config, learners: Learners, folder: Path, notice: Notice) -> None:
        self._every = config.copies_every
        self._learners, self._folder, self._notice = learners, folder, notice
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._told = False

    def is_due(self, step: int) -> bool:
        """Whether a copy is due after this step, and affordable."""
        return (
            self._every > 0
            and step % self._every == 0
            and (self._writing is None or self._writing.done())
            and time.monotonic() >= self._not_before
        )

    async def begin(self, state: RunState) -> float:
        """Have the ranks copy the state that they hold, which is that of `state`; the seconds that it kept them.

        It is written later. A copy that fails is told once, and costs nothing else. Raises LearnerError.
        """
        try:
            temporary = await asyncio.to_thread(checkpoints.begin, self._folder, state.step)
        except OSError as error:
            self._not_before = time.monotonic() + RETRY_SECONDS
            await self._give_up(checkpoints.temporary_folder(self._folder, state.step), str(error))
            return 0.0
        report = await self._learners.copy_state(temporary / "learner")
        self._not_before = time.monotonic() + report.seconds / SHARE
        if report.fault:
            await self._give_up(temporary, report.fault)
        else:
            self._writing = asyncio.ensure_future(self._write(temporary, state))
        return report.seconds

    async def end(self, *, remove: bool) -> None:
        """Wait for nothing; `remove`: a checkpoint has what the copies had."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
        if remove:
            await asyncio.to_thread(checkpoints.remove_all, self._folder)

    async def _write(self, temporary: Path, state: RunState) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        with contextlib.suppress(Exception):  # a rank that is gone: the step loop finds out by itself
            while not (report := await self._learners.copy_report()).written:
                if report.fault or time.monotonic() > deadline:
                    await self._give_up(temporary, report.fault or f"not written within {WRITE_SECONDS:g} s")
                    return
                await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(checkpoints.finish, temporary, state, 1)
            except OSError as error:
                await self._give_up(temporary, f"{error.strerror or error}: {error.filename}")

    async def _give_up(self, temporary: Path, fault: str) -> None:
        await asyncio.to_thread(checkpoints.discard, temporary)
        if not self._told:
            self._told = True
            text = f"no light copy of the learner's state could be made ({fault}); checkpoints are made as before"
            self._notice("copy_failed", text, level="warning")
