"""Hosts that a Ray cluster of this machine has its nodes on: what `node_network` and `node_processes` both offer."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass
class Host:
    """A host with an address of its own. `inside` goes before a command that is to run there."""

    name: str
    address: str
    inside: tuple[str, ...] = ()

    def processes(self) -> list[int]:
        """Ids of the processes that run there."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all of its processes without a word to them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class HostNetwork:
    """Hosts that reach one another; a context manager that leaves none of their processes behind."""

    kind = ""
    """What the hosts are, in words."""
    own_sessions = False
    """Whether each process of a host has to be the first of a session of its own."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.kill()

    def add(self, name: str) -> Host:
        """A further host."""
        raise NotImplementedError

    def cut(self, host: Host) -> None:
        """Pull the host's plug: what it still sends arrives nowhere, and nobody is told."""
        raise NotImplementedError

    def port(self, usual: int) -> int:
        """A port for a service of a host: the usual one, as each host has all of them."""
        return usual

    def own_disk(self, host: Host, folder: Path, seen: Path) -> list[str]:
        """Goes before a command on this host: the folder `seen` is another one on each host, as it is on other machines."""
        raise NotImplementedError

    def own_files(self, host: Host, folder: Path) -> list[str]:  # noqa: ARG002
        """Options of `ray start` for a node that joins, so that it does not share its files with the head."""
        return []

    def started(self, host: Host, pid: int) -> None:
        """This process was started for the host, as the first of a session."""
