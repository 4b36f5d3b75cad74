"""Tokens per second of an engine: now, and the best that it has kept up."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_SECONDS = 1.0
LONG_WINDOWS = 8
"""So many windows make the span over which a rate counts as kept up."""


class RateMeter:
    """`now` is over the last whole window of wall time; `saturated` is the best over a span of busy time.

    Busy time leaves out the pauses between bursts, but not the steps that decode one straggler. The span is
    `LONG_WINDOWS` windows: in its first second a batch makes far more tokens than it can keep up, all of them with short
    contexts and no new prompt among them. Until a whole span has passed, the best single window stands in.
    """

    def __init__(self, window: float = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._wall = (clock(), 0)
        self._marks = [(0.0, 0)]  # (busy seconds, tokens) at the ends of the last windows
        self._rate = 0.0
        self._short = 0.0
        self._long = 0.0

    def update(self, tokens: int, busy_seconds: float) -> None:
        """Tokens generated, and seconds spent generating, since the engine's start."""
        now = self._clock()
        if (seconds := now - self._wall[0]) >= self._window:
            self._rate = (tokens - self._wall[1]) / seconds
            self._wall = (now, tokens)
        if (seconds := busy_seconds - self._marks[-1][0]) >= self._window:
            self._short = max(self._short, (tokens - self._marks[-1][1]) / seconds)
            self._marks.append((busy_seconds, tokens))
            if len(self._marks) > LONG_WINDOWS:
                busy, made = self._marks.pop(0)
                self._long = max(self._long, (tokens - made) / (busy_seconds - busy))

    @property
    def saturated(self) -> float:
        return self._long or self._short

    @property
    def now(self) -> float:
        """0 when the last whole window ended long ago."""
        return self._rate if self._clock() - self._wall[0] < 3 * self._window else 0.0
