"""Memory of the process that asks: resident on the host, and the peak that PyTorch allocated on its GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes. `gpu_peak` is the most that PyTorch had allocated since the process started; 0 where it uses no GPU."""

    resident: int = 0
    gpu_peak: int = 0

    def metrics(self, role: str) -> dict[str, float]:
        """`memory/<role>/rss`, and `memory/<role>/gpu_peak` where there is one; nothing where it was not measured."""
        values = {f"memory/{role}/rss": float(self.resident), f"memory/{role}/gpu_peak": float(self.gpu_peak)}
        return {name: value for name, value in values.items() if value}


def largest_memory(processes: Iterable[ProcessMemory]) -> ProcessMemory:
    """The largest of each kind over several processes; zeros without any."""
    found = list(processes)
    return ProcessMemory(
        max((memory.resident for memory in found), default=0), max((memory.gpu_peak for memory in found), default=0)
    )


def process_memory() -> ProcessMemory:
    """Read the memory of this process. Imports no torch: a process that has not loaded it has nothing on a GPU."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    peak = int(torch.cuda.max_memory_allocated()) if torch is not None and on_gpu else 0
    return ProcessMemory(psutil.Process().memory_info().rss, peak)
