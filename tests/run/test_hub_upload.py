"""A run's model on the hub: the library's own client against a server on this machine that takes commits as the hub does."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import ConfigError
from pods_cluster.run.hub_upload import push
from tests.run.parts import loop_config


class Hub(ThreadingHTTPServer):
    """Holds the files of commits; with `refuses` it answers that status to everything."""

    daemon_threads = True
    refuses = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub, status = self.server, self.server.refuses or 200
        answer: dict[str, Any] = {}
        if hub.refuses:
            answer = {"error": "no"}
        elif self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            answer = {"url": f"{hub.url}/me/model", "name": "me/model"}
        elif self.path.endswith("/preupload/main"):
            wanted = json.loads(body)["files"]
            answer = {
                "files": [{"path": item["path"], "uploadMode": "regular", "shouldIgnore": False} for item in wanted]
            }
        elif self.path.endswith("/commit/main"):
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    hub.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            answer = {"commitUrl": f"{hub.url}/me/model/commit/1", "commitOid": "1" * 40, "success": True}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def pushed(folder: Path) -> tuple[bool, str]:
    return asyncio.run(push(folder, "me/model", private=True))


def test_the_folder_is_committed_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    done, told = pushed(tmp_path)
    assert done, told
    assert hub.files == {"config.json": b"{}", "model.safetensors": b"weights"}
    made = hub.made[0]
    assert (made["organization"], made["name"]) == ("me", "model")
    assert made.get("visibility") == "private" or made.get("private") is True, "older releases say it so"
    assert told == f"the model is at {hub.url}/me/model"


def test_a_hub_that_refuses_costs_the_upload_alone(hub: Hub, tmp_path: Path) -> None:
    hub.refuses = 403
    (tmp_path / "config.json").write_text("{}")
    done, text = pushed(tmp_path)
    assert not done
    assert text.startswith("run.push_to_hub: me/model could not be reached or refuses the model (")
    assert text.endswith(f"send it with: hf upload me/model {tmp_path}")
    assert "hf_secret" not in text


def test_what_is_no_repository_or_has_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.push_to_hub: 'model' is refused"):
        loop_config("run.push_to_hub=model", "run.export=true")
    with pytest.raises(ConfigError, match=r"run\.push_to_hub: 'me/model' needs the final model; set run\.export: true"):
        loop_config("run.push_to_hub=me/model", "run.export=false")
