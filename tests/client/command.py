"""The `pods` command in a process of its own, as its user types it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.warm_workers import VARIABLE


def pods(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pods_cluster.client.cli", *arguments]


def environment(*, cold: bool = False) -> dict[str, str]:
    """This process's, without what would lead the command to another cluster than its own. `cold`: all its processes
    descend from it, as a user's do, and none from the server of warm workers."""
    without = ("RAY_ADDRESS", "RAY_AUTH_MODE", *([VARIABLE] if cold else []))
    return {name: value for name, value in os.environ.items() if name not in without}


def on_cluster() -> dict[str, str]:
    """This process's environment, which leads a command to the Ray cluster of this process (the fixture `cluster`)."""
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def run(*command: str, timeout: float = 300, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {**(env or environment()), "COLUMNS": "160"}
    return subprocess.run(pods(*command), capture_output=True, text=True, timeout=timeout, env=env, check=False)
