"""Access to a Ray cluster before Ray itself is imported: its token, and whether anything listens at its address."""

from __future__ import annotations

import os
import socket
from pathlib import Path

CONNECT_SECONDS = 10.0


def use_ray_token() -> None:
    """Turn Ray's token authentication on where there is a token and RAY_AUTH_MODE is not set.

    Ray reads the variable when it is imported, and does not look for a token without it: a cluster with tokens (`ray
    start` makes one) would refuse the connection.
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


def check_reachable(address: str, seconds: float = CONNECT_SECONDS) -> None:
    """Raise ConnectionError where nothing listens at `host:port` within `seconds`, and for an address of Ray Client.

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
