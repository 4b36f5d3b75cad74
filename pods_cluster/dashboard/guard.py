"""Who may ask for what: checked for every request before it reaches the application."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from pods_cluster.dashboard.access_token import COOKIE, Token
from pods_cluster.dashboard.rate_limit import RateLimit

MAX_BODY = 16 * 1024
BODY_SECONDS = 10.0
"""A client may take so long to send its body."""
SEND_SECONDS = 60.0
"""A client that takes nothing of its answer for so long is let go."""
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    # Plotly sets the style of its elements and shows data: images; it runs nothing but its own script.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
logger = logging.getLogger(__name__)

_OPEN = ("/", "/healthz", "/favicon.svg", "/api/login")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """ASGI middleware.

    Reading is open to this machine under a name of this machine (another name: DNS rebinding, or a proxy in front).
    Everything else needs the token: `Authorization: Bearer …`, or the cookie that `POST /api/login` gave for it.
    """

    def __init__(self, app: App, *, token: Token, rate: RateLimit, guesses: RateLimit) -> None:
        self.app = app
        self.token = token
        self.rate = rate
        self.guesses = guesses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        guarded = _GuardedSend(send)
        refusal = self._refuse(scope, headers)
        if sum(name.lower() == b"host" for name, _ in scope["headers"]) > 1:
            refusal = (400, "more than one Host header", {})
        if refusal is None and scope["method"] not in _READING:
            try:
                body = await asyncio.wait_for(_body(headers, receive), BODY_SECONDS)
            except TimeoutError:
                refusal = (408, f"the body did not arrive in {BODY_SECONDS:g} s", {"connection": "close"})
            else:
                if body is None:
                    refusal = (413, f"the body is longer than {MAX_BODY} bytes", {})
                else:
                    receive = _replay(body, receive)
        try:
            if refusal is not None:
                await _answer(guarded, *refusal)
            else:
                await self.app(scope, receive, guarded)
        except Exception:
            if not guarded.stalled:
                raise
            logger.info("%s takes nothing of %s any more and is let go", address_of(scope), scope["path"])

    def _refuse(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, dict[str, str]] | None:
        address = address_of(scope)
        wait = self.rate.take(address)
        if wait:
            return 429, "too many requests", {"retry-after": str(math.ceil(wait))}
        path, reading = scope["path"], scope["method"] in _READING
        open_path = path in _OPEN or path.startswith("/static/")
        if not reading and not _same_origin(headers):
            return 403, "the request comes from another site's page", {}
        if open_path and (reading or path == "/api/login"):
            return None
        local = is_local(scope, headers)
        given = headers.get("authorization", "")
        cookie = session_cookie(headers.get("cookie", ""))
        if (local and reading) or (cookie and self.token.opens(cookie)):
            return None
        if given:
            wait = self.guesses.empty(address)
            if wait:
                return 429, "too many wrong tokens", {"retry-after": str(math.ceil(wait))}
            scheme, _, text = given.partition(" ")
            if scheme.lower() == "bearer" and self.token.matches(text.strip()):
                return None
            self.guesses.take(address)
        why = "changing a run" if local else "access from elsewhere, or under another name than localhost,"
        return 401, f"{why} needs the token (Authorization: Bearer …)", {"www-authenticate": "Bearer"}


def address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "local"


def is_local(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether a request comes from this machine, was meant for it, and was not handed on by a proxy."""
    if any(name in headers for name in ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")):
        return False
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() not in _LOCAL_NAMES:
        return False
    try:
        return ipaddress.ip_address(address_of(scope)).is_loopback
    except ValueError:
        return scope.get("client") is None  # a Unix socket: only this machine


def _same_origin(headers: dict[str, str]) -> bool:
    """A browser names the page that a change comes from; programs name none."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def session_cookie(text: str) -> str | None:
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None else None


async def _body(headers: dict[str, str], receive: Receive) -> bytes | None:
    """The whole body; None if it is too long."""
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) > MAX_BODY:
        return None
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if message["type"] != "http.request" or not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class _GuardedSend:
    """Sends to a client with our headers and a deadline; `stalled` once the client did not take a message in time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.stalled = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = dict(HEADERS)
            if b"cache-control" not in present:
                extra["cache-control"] = "no-store"
            message["headers"] = [
                *message.get("headers", []),
                *((name.encode(), value.encode()) for name, value in extra.items()),
            ]
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            self.stalled = True
            raise


async def _answer(send: Send, status: int, detail: str, headers: dict[str, str]) -> None:
    body = json.dumps({"detail": detail}).encode()
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
