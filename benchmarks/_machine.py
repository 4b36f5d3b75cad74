"""The machine that a benchmark ran on: every result file names it, since times mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "torch", "ray", "deepspeed", "transformers", "vllm", "liger-kernel")


def machine() -> dict[str, Any]:
    """CPU model and cores, memory (GiB), GPUs, operating system, Python and package versions, load before the run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the NVIDIA GPUs, from the driver's files: no CUDA context is made for it."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        names.append(found.group(1) if found else "unknown NVIDIA GPU")
    return names


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
