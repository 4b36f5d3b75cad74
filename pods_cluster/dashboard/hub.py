"""Server-sent events: what runs wrote, told to every page that listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

QUEUED = 64
"""Messages that may wait for a slow page; it is then told to fetch everything again."""
HEARTBEAT_SECONDS = 15.0
MAX_LISTENERS = 512


class TooManyListeners(Exception):
    """No further page can listen now."""


@dataclass(eq=False, slots=True)
class Listener:
    """One open stream. `runs` are the ids it hears of; empty: all."""

    runs: frozenset[str]
    address: str
    queue: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(QUEUED))
    behind: bool = False


class Hub:
    """Takes messages from any thread, hands them to the listeners on the event loop. Never waits for one of them."""

    def __init__(self, limit: int = MAX_LISTENERS) -> None:
        self.limit = limit
        self._listeners: set[Listener] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._listeners)

    def attach(self) -> None:
        """Serve the listeners on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def tell(self, kind: str, run: str, payload: dict[str, Any]) -> None:
        """Send a message about a run; from any thread."""
        if self._loop is None or self._closed or not self._listeners:
            return
        message = encode(kind, {"run": run, **payload})
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._hand_out, run, message)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(asyncio.QueueFull):
                listener.queue.put_nowait(b"")

    def join(self, runs: frozenset[str], address: str) -> Listener:
        """Raises TooManyListeners."""
        if len(self._listeners) >= self.limit:
            raise TooManyListeners(f"{self.limit} pages are listening; close some")
        listener = Listener(runs, address)
        self._listeners.add(listener)
        return listener

    async def stream(self, listener: Listener, touch: Callable[[], None] = lambda: None) -> AsyncGenerator[bytes, None]:
        """The bytes of one stream, until the page goes away or the server ends. `touch` is called now and then."""
        try:
            yield b"retry: 2000\n" + encode("hello", {})
            while not self._closed:
                touch()
                if listener.behind and listener.queue.empty():
                    listener.behind = False
                    yield encode("resync", {})
                try:
                    message = await asyncio.wait_for(listener.queue.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    message = b": still here\n\n"
                if not message:
                    return
                yield message
        finally:
            self._listeners.discard(listener)

    def _hand_out(self, run: str, message: bytes) -> None:
        for listener in self._listeners:
            if listener.runs and run not in listener.runs:
                continue
            try:
                listener.queue.put_nowait(message)
            except asyncio.QueueFull:
                listener.behind = True


def encode(kind: str, payload: dict[str, Any]) -> bytes:
    """One message. JSON holds no bare newline, so that no text of a run can end or forge a message."""
    text = json.dumps(payload, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=str)
    return f"event: {kind}\ndata: {text}\n\n".encode("ascii")
