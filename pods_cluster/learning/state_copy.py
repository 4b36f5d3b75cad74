"""A light copy of a rank's training state: taken between two steps, written by a thread while the rank goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pods_cluster.free_memory import free_memory
from pods_cluster.learning import rank_checkpoint
from pods_cluster.learning.reports import CopyReport
from pods_cluster.learning.trainer import Trainer

SPARE = 1
"""No copy is made unless the node has memory for those of all its ranks free, and so many more."""
SPARE_TO_KEEP = 3
"""With so many more free the memory is kept for the next copy."""
MOST_RANKS_OF_A_NODE = 8
PAGE = 4096


class StateCopier:
    """Copies a rank's state to the memory of its node, and from there to a folder, in the files of a checkpoint.

    Unlike a checkpoint it is not synchronised with the disk: it outlives processes, not a machine that loses power. The
    rank waits for the copy to memory alone. Memory that a system gives out anew is slow at its first use, most of all on a
    virtual machine; so it is asked for and touched beside the rank's steps (`prepare`), and kept where there is plenty.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._report = CopyReport()
        self._memory: dict[str, Float[Tensor, " numel"]] = {}
        self._kept = self._prepared = False

    def prepare(self, trainer: Trainer, world_size: int) -> None:
        """Once, after the first step: have a thread make the memory of all copies ready, if it will be kept."""
        if self._prepared:
            return
        self._prepared = True
        self._kept = _Room.of(trainer, world_size).holds(SPARE_TO_KEEP)
        if self._kept:
            self._start(self._touch, rank_checkpoint.sizes(trainer))

    def begin(self, trainer: Trainer, folder: Path, world_size: int) -> CopyReport:
        """Copy the state to memory and let a thread write it into `folder`; see `report`. It waits for the copy before."""
        self._join()
        began = time.perf_counter()
        self._report = report = CopyReport()
        if not self._memory and not (room := _Room.of(trainer, world_size)).holds(SPARE):
            report.fault = room.describe()
            return report
        state = rank_checkpoint.take(trainer, world_size, self._memory)
        self._start(self._write, state, folder, report)
        report.seconds = time.perf_counter() - began
        return report

    def report(self) -> CopyReport:
        """Report on the newest copy."""
        return self._report

    def _touch(self, sizes: dict[str, int]) -> None:
        try:
            for name, numel in sizes.items():
                memory = torch.empty(numel, dtype=torch.float32)
                memory.numpy()[:: PAGE // memory.element_size()] = 0  # by numpy: torch would use the step's threads
                self._memory[name] = memory
        except (RuntimeError, MemoryError):  # each copy asks for its own, and tells if there is none
            self._kept, self._memory = False, {}

    def _write(self, state: rank_checkpoint.TakenState, folder: Path, report: CopyReport) -> None:
        try:
            rank_checkpoint.write(state, folder)
        except Exception as error:  # a copy that fails costs nothing but itself
            report.fault = f"{type(error).__name__}: {error}"
        else:
            report.written = True
        finally:
            if not self._kept:
                self._memory = {}

    def _start(self, call: Callable[..., None], *given: Any) -> None:
        self._thread = threading.Thread(target=call, args=given, name="state copy", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a rank's state, bytes that its node has free, and how many ranks the node may hold."""

    state: int
    free: int
    ranks: int

    @classmethod
    def of(cls, trainer: Trainer, world_size: int) -> _Room:
        ranks = min(world_size, MOST_RANKS_OF_A_NODE)
        return cls(trainer.engine.optimizer_bytes(), free_memory(), ranks)

    def holds(self, spare: int) -> bool:
        """Whether all ranks' copies fit, and `spare` more."""
        return self.free >= (self.ranks + spare) * self.state

    def describe(self) -> str:
        ranks = f" in each of up to {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.state / 2**30:.1f} GiB of state{ranks}, {self.free / 2**30:.1f} GiB of memory free"
