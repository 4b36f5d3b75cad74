"""The seconds of an engine's thread, by what they went into (pure)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ThreadSeconds:
    """Seconds of an engine's thread since its start, as of its last step or command; together they are all of them.

    `steps` in `step`, with `rollout_seconds` of rollouts in it (those that decode at a step's end, times its seconds);
    `weights` while it joined a group or took weights, `verifying` while it took their fingerprints; `empty` without a
    rollout in flight; `between` two steps: prompts taken in, finished rollouts handed on. `count` steps.
    """

    steps: float = 0.0
    rollout_seconds: float = 0.0
    weights: float = 0.0
    verifying: float = 0.0
    empty: float = 0.0
    between: float = 0.0
    count: int = 0

    def __add__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


class Stopwatch:
    """Gives each moment of the thread to one part of `ThreadSeconds`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._at = clock()
        self._seconds = {each.name: 0.0 for each in fields(ThreadSeconds) if each.name != "count"}
        self._steps = 0

    def lap(self, part: str) -> float:
        """The time since the last call was spent on `part`; its seconds."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        self._seconds[part] += seconds
        return seconds

    def stepped(self, running: int) -> None:
        """The time since the last call was a step, in which so many rollouts were decoded."""
        self._seconds["rollout_seconds"] += self.lap("steps") * running
        self._steps += 1

    def read(self) -> ThreadSeconds:
        return ThreadSeconds(**self._seconds, count=self._steps)
