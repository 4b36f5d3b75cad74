"""The `pods` command as its user types it, in a process of its own, or in this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pods_cluster.client import cli
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


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run a command in this process, whose `sys.argv` the caller puts back: its exit code, and all that it says, without line
    breaks."""
    capsys.readouterr()
    sys.argv = ["pods", *words]
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    output = capsys.readouterr()
    return code, " ".join((output.out + output.err).split())
