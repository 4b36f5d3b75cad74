"""Memory of the process that asks: resident on the host, and the peak that PyTorch allocated on its GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes. `gpu_peak` is the most that PyTorch had allocated since the process started; 0 where it uses no GPU."""

    resident: int = 0
    gpu_peak: int = 0


def process_memory() -> ProcessMemory:
    """Read the memory of this process. Imports no torch: a process that has not loaded it has nothing on a GPU."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    peak = int(torch.cuda.max_memory_allocated()) if torch is not None and on_gpu else 0
    return ProcessMemory(psutil.Process().memory_info().rss, peak)
