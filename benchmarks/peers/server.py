"""The vLLM server of an arm in TRL's server mode: one card and half of the cores are the server's, the others the trainer's."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import Child
from pods_cluster.client.lanes import own_cores

HOST = "127.0.0.1"
OPTIONS = ("--max_model_len", "1024", "--gpu_memory_utilization", "0.3")
"""As in the colocated arms: as much cache as 1,024 rollouts of 1,024 tokens need."""
TRL = "from trl.cli import main; raise SystemExit(main())"
ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Sets the cores and becomes the command: threads that it starts later have the same ones."""
Cores = tuple[int, ...]

Serve = Callable[[str, int], list[str]]
"""The command that serves a model at a port."""


def trl_serve(model: str, port: int) -> list[str]:
    """TRL's own command. It starts `vllm serve` with what its trainer expects: weight transfer, log-probabilities."""
    return [sys.executable, "-c", TRL, "vllm-serve", "--model", model, "--host", HOST, "--port", str(port), *OPTIONS]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has been started; it may not answer yet."""

    process: Child
    address: str
    environment: dict[str, str]
    """The trainer's."""
    cores: tuple[Cores, Cores] | None
    """The server's and the trainer's; None: both have all."""

    def beside(self, command: Sequence[str]) -> list[str]:
        """The command, on the cores that are not the server's."""
        return _on(self.cores[1] if self.cores else None, command)

    def told(self) -> dict[str, Any]:
        """How it was started, for the result."""
        return {"options": shlex.join(OPTIONS)} | ({"cores": [len(each) for each in self.cores]} if self.cores else {})


@contextmanager
def serving(model: str, cards: Sequence[str], log: Path, serve: Serve = trl_serve) -> Iterator[Server]:
    """Start a server on the first of two cards and end it with its children, however the block ends.

    It does not wait for the server: the trainer does, and meanwhile imports what it needs.
    """
    port = _free_port()
    cores = _halves()
    first, second = ({**os.environ, "VLLM_HOST_IP": HOST, "CUDA_VISIBLE_DEVICES": card} for card in cards)
    process = Child(_on(cores[0] if cores else None, serve(model, port)), log, first)
    try:
        yield Server(process, f"http://{HOST}:{port}", second, cores)
    finally:
        try:
            process.ask(signal.SIGTERM)
        finally:
            process.kill()


def _on(cores: Sequence[int] | None, command: Sequence[str]) -> list[str]:
    if cores is None:
        return list(command)
    return [sys.executable, "-c", ON_CORES, ",".join(map(str, cores)), *command]


def _halves() -> tuple[Cores, Cores] | None:
    """This process's cores in two halves; None where there is one, or where the platform has no such setting."""
    cores = own_cores()
    half = len(cores) // 2
    return (cores[:half], cores[half:]) if half else None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]
