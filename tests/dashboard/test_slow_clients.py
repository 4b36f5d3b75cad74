"""Clients that send or take nothing are let go, on real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pods_cluster.dashboard import guard
from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from tests.dashboard.conftest import SECRET, Served


@pytest.fixture
def served(made: Path) -> Iterator[Served]:
    with Served(create_app([made], token=Token(SECRET))) as served:
        yield served


def request(served: Served, *lines: str) -> socket.socket:
    """A connection that has sent the head of a request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(served.socket.getsockname())
    client.settimeout(30)
    client.sendall("\r\n".join([*lines, "Host: localhost", "", ""]).encode())
    return client


def test_a_body_that_never_comes_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with request(served, "POST /api/login HTTP/1.1", "Content-Type: application/json", "Content-Length: 20") as client:
        client.sendall(b'{"token": ')
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive in 0.3 s" in answer


def test_a_page_that_takes_nothing_frees_its_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SEND_SECONDS", 0.3)
    hub = served.app.state.hub
    with request(served, "GET /api/stream?run=first HTTP/1.1") as client:
        assert client.recv(1) == b"H"
        deadline = time.monotonic() + 30
        while len(hub) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while len(hub):
            hub.tell("update", "first", {"text": "x" * 2**20})
            assert time.monotonic() < deadline, "it is held for a client that reads nothing"
            time.sleep(0.05)
