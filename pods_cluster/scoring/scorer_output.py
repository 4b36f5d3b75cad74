"""The output of rewards: read from the scorers' output, told apart by reward, and kept within bounds until it is fetched."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT_BYTES = 1 << 18
"""Size of the lines that are kept until somebody reads them; older ones are left out and counted."""
LINE_LENGTH = 2000
"""Longest line in characters; the rest of a longer one is cut."""
BYTES_PER_SECOND = 1 << 20
"""Bytes that one scorer may print a second; more is read, so that it never waits, and counted as left out."""

_MARK = b"\x1epods-reward:"
_MARKED = re.compile(re.escape(_MARK) + rb"(\d+)\n")


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line of a reward's output; `seconds` is the time of day (Unix)."""

    reward: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Printed:
    """Lines since the last reading, how many came before them and are gone, and where the next reading goes on."""

    lines: tuple[PrintedLine, ...] = ()
    left_out: int = 0
    next: int = 0


def speaker_mark(reward: int) -> bytes:
    """The bytes that a scorer writes into its own output when reward `reward` begins to run."""
    return _MARK + b"%d\n" % reward


@dataclass
class ScorerOutput:
    """The newest lines that the scorers of a pool printed; any thread may add and read."""

    rewards: Sequence[str]
    _lines: deque[PrintedLine] = field(default_factory=deque)
    _bytes: int = 0
    _total: int = 0
    _skipped: tuple[int, int] = (0, 0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Lines kept so far, in all."""
        return self._total

    def add(self, reward: int, text: str) -> None:
        """Keep a line, if something is in it."""
        # what a progress bar has drawn over is not seen by anybody
        text = text.rstrip("\r").rpartition("\r")[2].rstrip()[:LINE_LENGTH]
        if not text:
            return
        with self._lock:
            self._tell_skipped()
            self._keep(PrintedLine(self.rewards[reward], text, time.time()))

    def skip(self, reward: int, lines: int) -> None:
        """Count lines that are not kept; a line in their place says so."""
        with self._lock:
            if self._skipped[0] != reward:
                self._tell_skipped()
            self._skipped = reward, self._skipped[1] + lines

    def _tell_skipped(self) -> None:
        reward, lines = self._skipped
        if lines:
            self._skipped = reward, 0
            text = f"({lines:,} lines left out: more than {BYTES_PER_SECOND >> 20} MiB within a second)"
            self._keep(PrintedLine(self.rewards[reward], text, time.time()))

    def _keep(self, line: PrintedLine) -> None:
        self._lines.append(line)
        self._total += 1
        self._bytes += len(line.text)
        while self._bytes > KEPT_BYTES:
            self._bytes -= len(self._lines.popleft().text)

    def read(self, after: int = 0) -> Printed:
        """Return the lines after the first `after` ones; a repetition gives them again."""
        with self._lock:
            self._tell_skipped()
            first = self._total - len(self._lines)
            lines = tuple(self._lines)[max(0, after - first) :] if after < self._total else ()
            return Printed(lines, max(0, first - after), self._total)

    def tail(self, count: int = 3) -> str:
        """The newest lines as one short text; empty where nothing was printed."""
        with self._lock:
            return " | ".join(line.text[:200] for line in list(self._lines)[-count:])

    def follow(self, descriptor: int) -> threading.Thread:
        """Read a scorer's output in a thread of its own until it ends, and close the descriptor."""
        thread = threading.Thread(target=self._follow, args=(descriptor,), name="scorer-output", daemon=True)
        thread.start()
        return thread

    def _follow(self, descriptor: int) -> None:
        reward, rest, second, read = 0, b"", 0.0, 0
        try:
            while data := os.read(descriptor, 1 << 16):
                now = time.monotonic()
                if now - second > 1.0:
                    second, read = now, 0
                read += len(data)
                data = rest + data
                if read > BYTES_PER_SECOND:
                    marks = _MARKED.findall(data)
                    reward = int(marks[-1]) if marks else reward
                    self.skip(reward, data.count(b"\n") - len(marks))
                    rest = data[data.rfind(b"\n") + 1 :][-len(_MARK) - 8 :]
                    continue
                whole, _, rest = data.rpartition(b"\n")
                if whole or not rest:
                    reward = self._take(whole + b"\n", reward)
                if len(rest) > 4 * LINE_LENGTH:
                    reward, rest = self._take(rest, reward), b""
            self._take(rest, reward)
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def _take(self, data: bytes, reward: int) -> int:
        """Add whole lines; returns the reward that speaks at their end."""
        parts = _MARKED.split(data)
        for index, part in enumerate(parts):
            if index % 2:
                reward = min(int(part), len(self.rewards) - 1)
                continue
            for line in part.split(b"\n"):
                self.add(reward, line.decode("utf-8", "replace"))
        return reward
