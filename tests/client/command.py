"""The `pods` command in a process of its own, as its user types it."""

from __future__ import annotations

import os
import subprocess
import sys


def pods(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pods_cluster.client.cli", *arguments]


def environment() -> dict[str, str]:
    """This process's, without what would lead the command to another cluster than its own."""
    return {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "COLUMNS": "160"}
    return subprocess.run(pods(*command), capture_output=True, text=True, timeout=timeout, env=env, check=False)
