"""A light copy of a rank's training state: taken between two steps, written by a thread while the rank goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

from pods_cluster.learning import rank_checkpoint
from pods_cluster.learning.reports import CopyReport
from pods_cluster.learning.trainer import Trainer

SPARE_MEMORY = 2
"""The node has to have so many times the size of a rank's state free, or no copy is made: other ranks make theirs too."""


class StateCopier:
    """Copies a rank's state to the memory of its node, and from there to a folder, in the files of a checkpoint.

    Unlike a checkpoint it is not synchronised with the disk: it outlives processes, not a machine that loses power.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._report = CopyReport()

    def begin(self, trainer: Trainer, folder: Path, world_size: int) -> CopyReport:
        """Copy the state to memory and let a thread write it into `folder`; see `report`. It waits for the copy before."""
        if self._thread is not None:
            self._thread.join()
        began = time.perf_counter()
        needed = trainer.engine.optimizer_bytes()
        free = psutil.virtual_memory().available
        self._report = report = CopyReport()
        if free < SPARE_MEMORY * needed:
            report.fault = f"{needed / 2**30:.1f} GiB of state, {free / 2**30:.1f} GiB of memory free"
            return report
        state = rank_checkpoint.take(trainer, world_size)
        self._thread = threading.Thread(target=_write, args=(state, folder, report), name="state copy", daemon=True)
        self._thread.start()
        report.seconds = time.perf_counter() - began
        return report

    def report(self) -> CopyReport:
        """Report on the newest copy."""
        return self._report


def _write(state: rank_checkpoint.TakenState, folder: Path, report: CopyReport) -> None:
    try:
        rank_checkpoint.write(state, folder)
    except Exception as error:  # a copy that fails costs nothing but itself
        report.fault = f"{type(error).__name__}: {error}"
    else:
        report.written = True
