"""Tokens per second of an engine: now, and the best that it has kept up."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_SECONDS = 1.0


class RateMeter:
    """`now` is over the last whole window of wall time; `saturated` is the best over a window of busy time.

    A window of busy time leaves out the pauses between bursts, but not the steps that decode one straggler.
    """

    def __init__(self, window: float = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._wall = (clock(), 0)
        self._busy = (0.0, 0)
        self._rate = 0.0
        self.saturated = 0.0

    def update(self, tokens: int, busy_seconds: float) -> None:
        """Tokens generated, and seconds spent generating, since the engine's start."""
        now = self._clock()
        if (seconds := now - self._wall[0]) >= self._window:
            self._rate = (tokens - self._wall[1]) / seconds
            self._wall = (now, tokens)
        if (seconds := busy_seconds - self._busy[0]) >= self._window:
            self.saturated = max(self.saturated, (tokens - self._busy[1]) / seconds)
            self._busy = (busy_seconds, tokens)

    @property
    def now(self) -> float:
        """0 when the last whole window ended long ago."""
        return self._rate if self._clock() - self._wall[0] < 3 * self._window else 0.0
