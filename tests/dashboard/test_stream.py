"""What runs write reaches pages that listen."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pods_cluster.dashboard.access_token import Token
from pods_cluster.dashboard.app import create_app
from pods_cluster.dashboard.hub import QUEUED, Hub, TooManyListeners, encode
from tests.dashboard.conftest import SECRET, Served
from tests.dashboard.made import HOSTILE, append, make_run, sample_line, step_line


def messages(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_a_step_an_event_and_a_sample_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", 5, ended=False)
    make_run(tmp_path, "other", 2, ended=False)
    event = {
        "time": 1.0,
        "elapsed": 1.0,
        "step": 6,
        "kind": "odd",
        "level": "error",
        "text": f"{HOSTILE}\n\ndata: forged",
    }
    with (
        Served(create_app([tmp_path], token=Token(SECRET))) as served,
        httpx.stream("GET", f"{served.url}/api/stream?run=run", timeout=60) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        told = messages(response)
        assert next(told)[0] == "hello"
        append(folder.metrics, step_line(6, reward=0.75))
        append(folder.events, event)
        append(folder.samples, sample_line(6))
        rows, events, samples = [], [], 0
        while not (rows and events and samples):
            kind, message = next(told)
            assert (kind, message["run"]) == ("update", "run")
            rows += message["rows"]
            events += message["events"]
            samples += message["new_samples"]
        assert rows == [{"step": 6, "time": 1_700_000_006.0, "elapsed": 6.0, "reward": 0.75}]
        assert [found["text"] for found in events] == [event["text"]]
        assert message["live"]["step"] == 6
        assert message["live"]["errors"] == 1


def test_listeners_are_let_go_when_they_leave(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 2)
    app = create_app([tmp_path], token=Token(SECRET))
    with Served(app) as served:
        with httpx.stream("GET", f"{served.url}/api/stream?run=run", timeout=60) as response:
            told = messages(response)  # held: a generator that is dropped closes the response
            next(told)
            assert len(app.state.hub) == 1
        gone = threading.Event()
        for _ in range(400):
            if not len(app.state.hub):
                break
            gone.wait(0.05)
        assert not len(app.state.hub)


def test_a_slow_page_is_told_to_fetch_everything_again() -> None:
    async def run() -> None:
        hub = Hub(limit=1)
        hub.attach()
        listener = hub.join(frozenset({"run"}), "local")
        with pytest.raises(TooManyListeners):
            hub.join(frozenset(), "local")
        for number in range(QUEUED + 40):
            hub.tell("update", "run", {"number": number})
        hub.tell("update", "another", {})
        await asyncio.sleep(0)
        stream = hub.stream(listener)
        kinds = [(await anext(stream)).split(b"\n")[0] for _ in range(QUEUED + 1)]
        assert kinds == [b"retry: 2000", *[b"event: update"] * QUEUED]
        assert (await anext(stream)).startswith(b"event: resync")
        hub.tell("update", "run", {"number": "after"})
        await asyncio.sleep(0)
        assert b'"after"' in await anext(stream)
        await stream.aclose()
        assert len(hub) == 0

    asyncio.run(run())


def test_no_text_ends_a_message() -> None:
    message = encode("update", {"text": "a\n\nevent: forged\r\ndata: \u2028 {}"})
    assert message.count(b"\n") == 3
    assert b"\r" not in message
    assert json.loads(message.split(b"data: ", 1)[1])["text"].startswith("a\n\nevent")
