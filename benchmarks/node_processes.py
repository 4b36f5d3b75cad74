"""Hosts that are groups of processes on this machine, each with a loopback address of its own: what is left of
`node_network` where network namespaces cannot be made. Any Linux user; links have no speed of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

from benchmarks.hosts import Host, HostNetwork


class ProcessHost(Host):
    """An address, and the sessions of processes that were started for it."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name, address)
        self.sessions: set[int] = set()

    def processes(self) -> list[int]:
        """Ids of the processes of its sessions."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, OSError):
                if os.getsid(pid := int(entry.name)) in self.sessions:
                    found.append(pid)
        return found


class ProcessNetwork(HostNetwork):
    """The hosts; a context manager that leaves none of their processes behind."""

    kind = "processes with loopback addresses"
    own_sessions = True

    def add(self, name: str) -> Host:
        host = self.hosts[name] = ProcessHost(name, f"127.0.0.{len(self.hosts) + 2}")
        return host

    def cut(self, host: Host) -> None:
        """Stop the host's processes: what they were about to send arrives nowhere, and nobody is told."""
        for pid in host.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def port(self, usual: int) -> int:  # noqa: ARG002
        """A free port: another cluster of this machine may have the usual one."""
        with contextlib.closing(socket.create_server(("", 0))) as found:
            return found.getsockname()[1]

    def own_disk(self, host: Host, folder: Path, seen: Path) -> list[str]:  # noqa: ARG002
        """Nothing: all hosts see one disk."""
        seen.mkdir(parents=True, exist_ok=True)
        return []

    def own_files(self, host: Host, folder: Path) -> list[str]:
        """Nodes that start together would choose the same names for their sockets."""
        return [f"--temp-dir={folder / 'nodes' / host.name}"]

    def started(self, host: Host, pid: int) -> None:
        assert isinstance(host, ProcessHost)
        host.sessions.add(pid)
