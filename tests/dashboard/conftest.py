from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the dashboard's extra is not installed")

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from tests.dashboard.made import make_run

SECRET = "correct-horse-battery-staple"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, which tests only read."""
    root = tmp_path_factory.mktemp("made")
    make_run(root, "first", 60)
    make_run(root, "second", 30, seed=3)
    return root


@pytest.fixture
def client(made: Path) -> Iterator[TestClient]:
    with connect(create_app([made], token=Token(SECRET))) as client:
        yield client


def connect(app: FastAPI, address: str = "127.0.0.1", host: str = "localhost:8765") -> TestClient:
    """A client at an address that asks for a host."""
    return TestClient(app, base_url=f"http://{host}", client=(address, 50_000), raise_server_exceptions=False)


class Served:
    """A dashboard on a real socket, in a thread."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self) -> Served:
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline, "the server did not start"
            assert self.thread.is_alive(), "the server ended"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
