"""A judge over HTTP: a real server on this machine that answers as an OpenAI-compatible endpoint does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pods_cluster.config import RewardConfig
from pods_cluster.scoring import judge as module
from pods_cluster.scoring.judge import JudgeError, grade_of, judge
from pods_cluster.scoring.reward_registry import load_reward
from pods_cluster.scoring.score import ScoreRequest


class Endpoint(ThreadingHTTPServer):
    """Answers with `reply(text of the request)`: a text, or a status to fail with."""

    daemon_threads = True

    def __init__(self, reply: Callable[[str], str | int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.seen, self.keys = reply, [], []  # type: ignore[var-annotated]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.server.seen.append((self.path, body["model"], text))
        self.server.keys.append(self.headers.get("Authorization"))
        answer = self.server.reply(text)
        code = answer if isinstance(answer, int) else 200
        data = json.dumps(
            {"choices": [{"message": {"content": answer}}]} if code == 200 else {"error": "busy"}
        ).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Endpoint]]:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    servers: list[Endpoint] = []

    def start(reply: Callable[[str], str | int]) -> Endpoint:
        servers.append(Endpoint(reply))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_grades_come_back_in_order_and_as_shares(
    endpoint: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = endpoint(lambda text: f"It is fine.\nScore: {len(text.split('[response]')[1].split()[0])}")
    texts = ["a" * length for length in range(1, 9)]
    rows = [ScoreRequest("2+2?", text, answer="4") for text in texts]
    reward = RewardConfig(
        name="pods_cluster.scoring.judge:judge",
        batch=16,
        options={"url": server.url, "model": "big", "key_variable": "JUDGE_KEY", "concurrency": 3},
    )
    assert load_reward(reward, 0, {"answer"})(rows) == pytest.approx([length / 10 for length in range(1, 9)])
    path, model, text = server.seen[0]
    assert (path, model) == ("/v1/chat/completions", "big")
    assert "A right answer is:\n4" in text
    assert "2+2?" in text
    assert set(server.keys) == {"Bearer secret"}


def test_a_busy_endpoint_is_asked_again_and_a_refusing_one_is_not(endpoint: Callable[..., Endpoint]) -> None:
    answers = iter([503, 429, "Score: 5"])
    server = endpoint(lambda text: next(answers))
    assert judge(["q"], ["r"], url=server.url, model="m") == [0.5]
    assert len(server.seen) == 3
    refusing = endpoint(lambda text: 401)
    with pytest.raises(JudgeError, match=r"chat/completions: HTTP 401: .*busy"):
        judge(["q"], ["r"], url=refusing.url, model="m")
    assert len(refusing.seen) == 1
    down = endpoint(lambda text: 500)
    with pytest.raises(JudgeError, match="2 attempts failed, the last by HTTP 500"):
        judge(["q"], ["r"], url=down.url, model="m", attempts=2)
    with pytest.raises(JudgeError, match="1 attempts failed"):
        judge(["q"], ["r"], url="http://127.0.0.1:9/v1", model="m", attempts=1)


def test_chats_and_a_template_of_ones_own(endpoint: Callable[..., Endpoint]) -> None:
    server = endpoint(lambda text: "1")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    template = '{"q": "{question}", "r": "{response}"}'
    said = [[{"role": "assistant", "content": "So."}]]
    assert judge([chat], said, url=server.url, model="m", template=template, highest=1.0) == [1.0]
    assert server.seen[0][2] == '{"q": "Be brief.\n\nWhy?", "r": "So."}'


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Score: 7", 0.7),
        ("2 points off.\nScore: 7/10", 0.7),
        ("7.5 out of 10", 0.75),
        ("**Score:** 12", 1.0),
        ("Score: -3", 0.0),
        ("step 3 is wrong, so 4.", 0.4),
    ],
)
def test_the_last_number_is_the_grade(reply: str, grade: float) -> None:
    assert grade_of(reply, 10.0) == pytest.approx(grade)


def test_a_reply_without_a_number_is_an_error() -> None:
    with pytest.raises(JudgeError, match="no number: 'Good'"):
        grade_of("Good", 10.0)
