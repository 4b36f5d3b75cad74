"""The queue between a recorder and its sinks: one thread writes, nobody waits for it, and a sink that fails is counted."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pods_cluster.telemetry.sinks import JsonlSink, Sink

logger = logging.getLogger(__name__)
GIVE_UP_AFTER = 20
"""Failures in a row of one kind of call after which a sink is left alone."""
QUEUED_ITEMS = 10_000
"""Items that may wait for slow sinks; more are given up and counted."""
RETRY_SECONDS = 2.0


class SinkQueue:
    """Passes items to every sink, on a thread of its own.

    `tell(key, text)` is called with what a person should know of a sink's troubles; the key is the same for the same one.
    """

    def __init__(self, sinks: Sequence[Sink], tell: Callable[[str, str], None]) -> None:
        self.sinks: list[Sink] = list(sinks)
        self.dropped = 0
        self.closed = False
        self._tell = tell
        self._failures: dict[str, int] = {}
        # by kind of call: a sink that takes events, or has nothing to retry, may fail in all steps all the same
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=QUEUED_ITEMS)
        self._thread = threading.Thread(target=self._drain, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def failed_writes(self) -> int:
        """Calls that a sink failed in, and lines that could not be written at once."""
        return sum(self._failures.values()) + sum(sink.failed_writes for sink in self._files())

    @property
    def dropped_lines(self) -> int:
        """Number of lines that were given up, in the queue and in the files."""
        return self.dropped + sum(sink.dropped_lines for sink in self._files())

    def put(self, what: str, payload: Any) -> None:
        """Have `Sink.<what>(payload)` called. It never waits: where too many items wait already, this one is given up."""
        if self.closed:
            return
        try:
            self._queue.put_nowait((what, payload))
        except queue.Full:
            self.dropped += 1
            self._tell("queue", f"the sinks are {QUEUED_ITEMS} items behind; new ones are given up")

    def flush(self, timeout: float) -> bool:
        """Wait until everything put before is with the sinks; false at the timeout."""
        if self.closed:
            return True
        done = threading.Event()
        try:
            self._queue.put(("flush", done), timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Hand over what waits and close the sinks; one that hangs is left behind at the timeout."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(queue.Full):
            self._queue.put(("close", None), timeout=timeout)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("telemetry: a sink has not ended within %g s; its last lines may be missing", timeout)

    def _files(self) -> list[JsonlSink]:
        return [sink for sink in self.sinks if isinstance(sink, JsonlSink)]

    def _drain(self) -> None:
        """Pass one item after another to every sink, on the queue's thread."""
        while True:
            try:
                what, payload = self._queue.get(timeout=RETRY_SECONDS)
            except queue.Empty:
                what, payload = "retry", threading.Event()
            call, args = ("retry", ()) if what == "flush" else (what, () if what in ("retry", "close") else (payload,))
            for sink in list(self.sinks):
                self._guard(sink, call, *args)
            if call == "retry":
                payload.set()
            elif call == "close":
                return

    def _guard(self, sink: Sink, call: str, *args: Any) -> None:
        try:
            getattr(sink, call)(*args)
        except Exception as error:  # whatever a sink does, training goes on
            self._failures[sink.name] = self._failures.get(sink.name, 0) + 1
            in_a_row = self._in_a_row[sink.name, call] = self._in_a_row.get((sink.name, call), 0) + 1
            cause = f"{type(error).__name__}: {error}"
            self._tell(f"sink:{sink.name}", f"the {sink.name} sink failed ({cause}); training goes on")
            if in_a_row == GIVE_UP_AFTER and sink in self.sinks:
                self.sinks.remove(sink)
                text = f"the {sink.name} sink failed {GIVE_UP_AFTER} times in a row and is left alone"
                self._tell(f"gave up:{sink.name}", text)
        else:
            self._in_a_row[sink.name, call] = 0
