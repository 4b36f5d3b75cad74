"""Asks the server of `tests/warm_workers.py` for a process in the place of this one. Imports next to nothing."""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import socket

LIMITS = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE", "RLIMIT_AS")


def start_warm(address: str, command: list[str]) -> bool:
    """Whether a warm process runs this command, with this one's environment, folder, limits and open streams."""
    message = {
        "pid": os.getpid(),
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    }
    body = json.dumps(message).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)  # the first one waits for the imports
            connection.connect(address)
            streams = array.array("i", [0, 1, 2])
            connection.sendmsg([len(body).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            connection.sendall(body)
            if connection.recv(1) != b"y":
                return False
            connection.sendall(b"y")
            with contextlib.suppress(OSError):
                connection.recv(1)  # it is there now, and has this process's group
            return True
    except OSError:
        return False
