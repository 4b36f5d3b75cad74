"""The lock of a card that engines share: they start one after the other, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pods_cluster.generation.engine import EngineError

LOCK_SHARE = 0.8
"""Part of `generator.start_timeout` that an engine waits for another one to start: the cause then comes before the general
error of a worker that has not started."""
_LOCK_POLL_SECONDS = 0.2


@contextlib.contextmanager
def start_lock(patience: float) -> Iterator[None]:
    """Holds the lock of this process's cards, so that the engines that share a card start one after the other.

    vLLM sizes its cache by the memory that is used while it starts; engines that were told the size
    (`engine_options.kv_cache_gb`) need no lock. Raises EngineError when another process has it for `patience` seconds.
    """
    cards = re.sub(r"[^A-Za-z0-9-]+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))[:64]
    path = Path(tempfile.gettempdir()) / f"pods-vllm-start-{os.getuid()}-{cards}.lock"
    deadline = time.monotonic() + patience
    with path.open("a+") as file:
        while not _locked(file):
            if time.monotonic() > deadline:
                file.seek(0)
                raise EngineError(
                    f"vLLM did not start: process {file.read().strip() or 'unknown'} has been starting another engine on "
                    f"this card for {patience:g} s (lock {path}). End it if it hangs; or raise generator.start_timeout, of "
                    f"which {LOCK_SHARE:.0%} may pass here; or set generator.engine_options.kv_cache_gb, with which engines "
                    "start side by side"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a process of the engine has inherited the file


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
