"""Who may read, who may change, and how hard one may try."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fastapi import FastAPI

from pods_cluster.dashboard import DashboardError
from pods_cluster.dashboard.access_token import COOKIE, FILE, Token, load_token, read_token
from pods_cluster.dashboard.app import GUESSES, create_app
from pods_cluster.dashboard.rate_limit import RateLimit
from pods_cluster.dashboard.server import find_token, listen
from tests.dashboard.conftest import SECRET, connect
from tests.dashboard.remembering import Remembering

BEARER = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture
def controls() -> Remembering:
    return Remembering()


@pytest.fixture
def app(made: Path, controls: Remembering) -> FastAPI:
    return create_app([made], token=Token(SECRET), controls=controls)


@pytest.mark.parametrize("path", ["/api/runs/first/scale", "/api/runs/first/stop", "/api/login"])
@pytest.mark.parametrize(
    "body",
    [b'{"generators": NaN}', b'{"generators": Infinity}', b'{"learners": -1e400}', b'{"reason": "\\ud800"}',
     b'{"reason": "\\u001b[2J"}', b'{"reason": "\\u0000"}', b'{"token": "\\ud800"}', b'{"\\ud800": 1}', b"\x1f\x8b", b"\xff",
     b"[" * 5000, b"9" * 9000, b"null", b'"text"', b"[]", b"{", b'{"generators": ' + b"9" * 5000 + b"}"],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_a_body_of_any_kind_is_refused_and_not_sent_back(
    app: FastAPI, controls: Remembering, path: str, body: bytes
) -> None:
    with connect(app) as client:
        for kind in ("application/json", "text/plain", ""):
            answer = client.post(path, content=body, headers={**BEARER, "content-type": kind})
            assert answer.status_code in (400, 422), answer.text
            assert all("input" not in item for item in answer.json()["detail"] if isinstance(item, dict))
    assert controls.asked == []


def test_a_wrong_token_is_not_sent_back(app: FastAPI) -> None:
    with connect(app) as client:
        answer = client.post("/api/login", json={"token": 1234567, "secret": "do not repeat"})
        assert answer.status_code == 422
        assert "1234567" not in answer.text
        assert "do not repeat" not in answer.text


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "-1", "1e3", "", "0x1"])
def test_a_length_that_is_none_is_refused(app: FastAPI, length: str) -> None:
    with connect(app) as client:
        headers = {**BEARER, "content-length": length.encode("latin-1")}
        assert client.post("/api/runs/first/scale", content=b"{}", headers=headers).status_code == 413


def test_a_second_host_is_refused(app: FastAPI) -> None:
    with connect(app) as client:
        answer = client.get("/api/runs", headers=[("host", "evil.example"), ("host", "localhost")])
        assert answer.status_code == 400


@pytest.mark.parametrize("host", ["localhost:8765", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_reading_is_open_on_this_machine(app: FastAPI, host: str, address: str) -> None:
    with connect(app, address, host) as client:
        assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    ("address", "host", "headers"),
    [
        ("10.0.0.7", "localhost:8765", {}),
        ("10.0.0.7", "machine:8765", {}),
        ("127.0.0.1", "evil.example:8765", {}),  # DNS rebinding
        ("127.0.0.1", "localhost.evil.example", {}),
        ("127.0.0.1", "localhost:8765", {"x-forwarded-for": "10.0.0.7"}),  # a proxy on this machine
        ("127.0.0.1", "localhost:8765", {"forwarded": "for=127.0.0.1"}),
    ],
)
def test_reading_from_elsewhere_needs_the_token(app: FastAPI, address: str, host: str, headers: dict[str, str]) -> None:
    with connect(app, address, host) as client:
        for path in ("/api/runs", "/api/runs/first/samples", "/api/stream?run=first", "/metrics", "/api/openapi.json"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/", headers=headers).status_code == 200, "the page itself asks for the token"
        assert client.get("/healthz", headers=headers).status_code == 200
        assert client.get("/api/runs", headers={**headers, **BEARER}).status_code == 200
        assert client.get("/api/runs", headers={**headers, "authorization": "Bearer wrong"}).status_code == 401


def test_every_change_needs_the_token_here_too(app: FastAPI, controls: Remembering) -> None:
    with connect(app) as client:
        for path, body in (("scale", {"generators": 2}), ("stop", {})):
            assert client.post(f"/api/runs/first/{path}", json=body).status_code == 401
        assert controls.asked == []
        answer = client.post("/api/runs/first/scale", json={"generators": 2}, headers=BEARER)
        assert answer.json() == {"accepted": True, "detail": "asked for"}
        assert client.post("/api/runs/first/stop", json={"reason": "enough"}, headers=BEARER).status_code == 200
        assert controls.asked == [("scale", "first", 2, None), ("stop", "first", "enough")]


def test_what_controls_answer(app: FastAPI, made: Path) -> None:
    with connect(app) as client:
        assert client.post("/api/runs/second/stop", json={}, headers=BEARER).status_code == 409
        too_many = client.post("/api/runs/first/scale", json={"generators": 4096}, headers=BEARER)
        assert (too_many.status_code, too_many.json()["detail"]) == (502, "the cluster is too small")
        for body in (
            {},
            {"generators": 0},
            {"generators": True},
            {"generators": "3"},
            {"learner": 2},
            {"learners": 9999},
        ):
            assert client.post("/api/runs/first/scale", json=body, headers=BEARER).status_code == 422, body
        assert client.get("/api/runs/first/live").json()["step"] == 3
    with connect(create_app([made], token=Token(SECRET))) as client:
        assert client.post("/api/runs/first/stop", json={}, headers=BEARER).status_code == 503
        assert client.get("/api/runs/first/live").status_code == 503


def test_a_browser_signs_in_once(app: FastAPI) -> None:
    with connect(app, "10.0.0.7", "machine:8765") as client:
        assert client.get("/api/session").status_code == 401
        assert client.post("/api/login", json={"token": "wrong-wrong-wrong-wrong"}).status_code == 401
        answer = client.post("/api/login", json={"token": f" {SECRET}\n"})
        assert answer.status_code == 204
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert SECRET not in cookie
        assert client.get("/api/session").json() == {"local": False, "signed_in": True, "controls": True}
        assert client.post("/api/runs/first/stop", json={}).status_code == 200
        client.cookies.clear()
        client.cookies.set(COOKIE, "0" * 64)
        assert client.get("/api/runs").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_sites_page_changes_nothing(app: FastAPI, controls: Remembering, headers: dict[str, str]) -> None:
    with connect(app) as client:
        client.cookies.set(COOKIE, Token(SECRET).session)
        assert client.post("/api/runs/first/stop", json={}, headers=headers).status_code == 403
        assert controls.asked == []
        own = {"origin": "http://localhost:8765", "sec-fetch-site": "same-origin"}
        assert client.post("/api/runs/first/stop", json={}, headers=own).status_code == 200


def test_no_other_site_is_invited_and_nothing_is_framed(app: FastAPI) -> None:
    with connect(app) as client:
        for path in ("/", "/api/runs", "/static/app.js", "/nowhere"):
            headers = client.get(path, headers={"origin": "http://evil.example"}).headers
            assert "access-control-allow-origin" not in headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
        assert client.get("/api/runs").headers["cache-control"] == "no-store"
        assert client.options("/api/runs", headers={"origin": "http://evil.example"}).status_code == 405


def test_bodies_are_bounded(app: FastAPI) -> None:
    with connect(app) as client:
        assert client.post("/api/login", content=b"x" * 20_000).status_code == 413

        def dripping():
            for _ in range(40):
                yield b"x" * 1000

        assert client.post("/api/login", content=dripping()).status_code == 413


def test_guessing_is_slow(app: FastAPI) -> None:
    with connect(app, "10.0.0.7", "machine:8765") as client:
        answers = [
            client.get("/api/runs", headers={"authorization": f"Bearer {n}"}).status_code for n in range(GUESSES + 3)
        ]
        assert answers == [401] * GUESSES + [429] * 3
        assert client.post("/api/login", json={"token": SECRET}).status_code == 429, "the right one has to wait too"
    with connect(app, "10.0.0.8", "machine:8765") as client:
        assert client.get("/api/runs", headers=BEARER).status_code == 200, "others are not locked out"


def test_requests_are_limited_by_address(made: Path) -> None:
    app = create_app([made], token=Token(SECRET), rate=RateLimit(0.001, 3))
    with connect(app) as client:
        answers = [client.get("/healthz") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
        assert int(answers[-1].headers["retry-after"]) > 0


def test_a_bucket_fills_again() -> None:
    now = [0.0]
    limit = RateLimit(2.0, 4.0, clock=lambda: now[0])
    assert [limit.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    now[0] = 0.5
    assert limit.take("a") == 0
    assert limit.take("b") == 0
    now[0] = 100
    assert [limit.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_the_token_is_made_once_for_the_owner_alone(tmp_path: Path) -> None:
    token = load_token(tmp_path)
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text().strip()
    assert len(text) >= 40
    assert token.matches(text)
    assert load_token(tmp_path).matches(text)
    assert not token.matches(text[:-1])
    assert not token.opens(text)
    assert text not in repr(token)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [FILE]


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_token(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(DashboardError, match=r"mode 640.*chmod 600"):
        load_token(tmp_path)


def test_a_token_is_not_read_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("a-token-of-someone-else")
    other.chmod(0o600)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / FILE).symlink_to(other)
    token = load_token(tmp_path / "root", home=tmp_path / "home")
    assert token.source == str(tmp_path / "home" / "pods" / "token")


def test_the_token_goes_home_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    nobody_writes = Path("/proc")
    assert load_token(nobody_writes, home=tmp_path / "home").source == str(tmp_path / "home" / "pods" / "token")


def test_tokens_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(DashboardError, match="holds no token"):
        read_token(path)
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(DashboardError, match="too few"):
        read_token(path)
    path.write_text(SECRET + "\n")
    assert find_token([tmp_path], path).matches(SECRET)


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=f"--port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(DashboardError, match="no such folder"):
        find_token([tmp_path / "none"])
