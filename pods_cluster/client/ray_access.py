"""Before a cluster is talked to: its token, and whether anybody is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

KNOCK_SECONDS = 10.0


def use_token() -> None:
    """Use Ray's token where there is one and nothing else is said; ray reads this when it is imported.

    Ray's clients do not do this alone: a cluster with tokens (`ray start` makes one) would refuse them.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    there = (
        bool(os.environ.get("RAY_AUTH_TOKEN"))
        or bool(os.environ.get("RAY_AUTH_TOKEN_PATH"))
        or (Path.home() / ".ray" / "auth_token").is_file()
    )
    if there:
        os.environ["RAY_AUTH_MODE"] = "token"


def knock(address: str, seconds: float = KNOCK_SECONDS) -> None:
    """Raises ConnectionError where nobody listens at `host:port` within `seconds`, and for an address of Ray Client.

    Ray itself would try for minutes. An address without a port is left to it.
    """
    if address.startswith("ray://"):
        raise ConnectionError(
            f"{address}: Ray Client holds a run only as long as its connection; give the cluster's own address "
            "(host:port, by default 6379) on one of its nodes, or use pods submit with its dashboard's (http://host:8265)"
        )
    host, _, port = address.rstrip("/").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), seconds).close()
        except OSError as error:
            raise ConnectionError(f"{address}: {error.strerror or error}") from error
