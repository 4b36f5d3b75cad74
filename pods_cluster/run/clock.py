"""Seconds by stage of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up wall-clock seconds by stage: `with clock("publish"): …`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - begin

    def timings(self) -> dict[str, float]:
        """`timing_s/<stage>` of each stage, and of the step so far."""
        timings = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        return timings | {"timing_s/step": time.monotonic() - self.started}
