"""The `pods` command in a process of its own, as its user types it."""

from __future__ import annotations

import os
import subprocess
import sys


def pods(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pods_cluster.client.cli", *arguments]


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PODS_STRICT_METRICS": "1", "COLUMNS": "160"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(pods(*command), capture_output=True, text=True, timeout=timeout, env=environment, check=False)
