"""Starting the dashboard."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from pods_cluster.client.controls import Controls
from pods_cluster.dashboard import DashboardError
from pods_cluster.dashboard.access_token import Token, load_token, read_token
from pods_cluster.dashboard.app import create_app
from pods_cluster.wording import counted

CLOSE_SECONDS = 3


def serve(
    paths: Sequence[str | Path],
    host: str = "127.0.0.1",
    port: int = 8765,
    *,
    token_file: Path | None = None,
    controls: Controls | None = None,
    say: Callable[[str], None] = print,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve run folders, or folders of them, until interrupted. Port 0 takes a free one.

    `say` is told where the page is and where its token lies (never the token); `ready` gets the address.
    Raises RunFolderError if a folder is missing, DashboardError if the port is taken or the token is not safe.
    """
    token = find_token(paths, token_file)
    app = create_app(paths, token=token, controls=controls)
    listening = listen(host, port)
    address = url(listening)
    say(f"dashboard of {counted(len(app.state.runs), 'run')} at {address} (Ctrl-C ends it; runs go on)")
    if not _is_loopback(host):
        say(f"open to other machines, without encryption: they need the token in {token.source}")
    elif controls is not None:
        say(f"changing a run needs the token in {token.source}")
    if ready is not None:
        ready(address)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # a log of requests would hold what clients send
        proxy_headers=False,  # a client's own word is no address
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=30,
    )
    uvicorn.Server(config).run(sockets=[listening])


def find_token(paths: Sequence[str | Path], token_file: Path | None = None) -> Token:
    """The token of a file of the user's, or of the folder in which the runs lie. Raises DashboardError."""
    if token_file is not None:
        return read_token(token_file)
    first = Path(paths[0]).expanduser().absolute() if paths else Path()
    root = first.parent if (first / "config.yaml").is_file() else first
    if not root.is_dir():
        raise DashboardError(f"{root}: there is no such folder; give the folder of a run, or a folder of runs")
    return load_token(root)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises DashboardError."""
    if not 0 <= port <= 65535:  # else the resolver takes what is left over 65536
        raise DashboardError(f"--port {port}: is no port; give one from 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DashboardError(
            f"--host {host} --port {port}: cannot be listened on ({reason}); choose another port"
        ) from None
    return listening


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = ["create_app", "find_token", "listen", "serve", "url"]
