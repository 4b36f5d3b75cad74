"""Access to a Ray cluster: its token, whether anything listens at its address, and clusters of this machine alone.

The module can be imported before Ray is.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 10.0
LOOPBACK = ("127.0.0.1", "localhost")


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


def token_hint(error: BaseException) -> str:
    """Advice where a cluster refused a connection for want of its token; empty for other errors."""
    if not re.search(r"\b(401|403)\b|[Uu]nauthori|[Uu]nauthenticated|[Tt]oken|[Aa]uthenticat", str(error)):
        return ""
    mode = os.environ.get("RAY_AUTH_MODE")
    fix = "set RAY_AUTH_MODE=token" + (f" (it is {mode!r})" if mode and mode != "token" else "")
    if mode == "token":
        fix = "the token of here is not the cluster's: copy that"
    return (
        f"the cluster asks for a token: {fix}, in RAY_AUTH_TOKEN, in a file that RAY_AUTH_TOKEN_PATH names, or in "
        f"~/.ray/auth_token (see docs/operations.md)"
    )


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


@contextlib.contextmanager
def loopback_cluster() -> Iterator[None]:
    """Within, Ray takes 127.0.0.1 for this machine's address, as it does on macOS and Windows: what it starts listens there
    alone, in place of on all interfaces, and what it connects to is looked for there.
    """
    from ray._private import ray_constants

    name = "ENABLE_RAY_CLUSTER"
    if not hasattr(ray_constants, name):  # another Ray: as that has it
        yield
        return
    before = getattr(ray_constants, name)
    setattr(ray_constants, name, False)
    try:
        yield
    finally:
        setattr(ray_constants, name, before)


@contextlib.contextmanager
def without_onlookers() -> Iterator[None]:
    """Within, Ray starts a cluster without the processes that only look on: its log monitor, whose lines go to a driver that
    wants none, its dashboard, as where that fails to start, and the monitor of its autoscaler, which has no nodes to add.

    They take a core three seconds to start, and two per cent of one as long as they live.
    """
    from ray._private import services
    from ray._private.node import Node

    parts: list[tuple[Any, str, Any]] = [
        (Node, "start_log_monitor", lambda *_: None),
        (Node, "start_monitor", lambda *_: None),
        (services, "start_api_server", lambda *_, **__: (None, None)),
    ]
    with contextlib.ExitStack() as undo:
        for place, name, instead in parts:
            if hasattr(place, name):  # not in another Ray: as that has it
                undo.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, instead)
        yield


def reaching(address: str) -> contextlib.AbstractContextManager[None]:
    """The context for `ray.init(address)`: `loopback_cluster` where such a cluster is meant."""
    from ray._private import services

    if address == "auto":
        with contextlib.suppress(Exception):  # several clusters, or none: ray.init says so
            address = services.get_ray_address_from_environment("auto", None) or ""
    host, _, port = address.rpartition(":")
    if host in LOOPBACK and port.isdigit() and not _answers(services.get_node_ip_address(), int(port)):
        return loopback_cluster()
    return contextlib.nullcontext()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
