"""Lines of a file that another process appends to, with the place of each."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    from orjson import loads  # pyright: ignore[reportMissingImports]  # a third of the time, where it is installed
except ImportError:
    from json import loads

LONGEST_LINE = 64 * 2**20
"""A longer line is skipped: nothing that a run writes comes near."""


class Line(NamedTuple):
    """Byte offset in the file, and the line without its newline."""

    offset: int
    data: bytes


class LineTail:
    """Follows a file; `poll` returns the lines completed since then, a bounded amount at a time.

    A file that was replaced, or cut shorter than what was read, is read from its beginning: `restarts` counts that.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.size = 0
        self.restarts = 0
        self.caught_up = False
        """The last poll reached the end of what is written."""
        self._inode: int | None = None
        self._skipping = False

    def poll(self, limit: int = 2**20) -> list[Line]:
        """New lines, of about `limit` bytes at most. A file that is not there has none. Raises OSError otherwise."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self.caught_up = True
            return []
        if status.st_size < self.offset or (self._inode not in (None, status.st_ino)):
            self.offset = 0
            self._skipping = False
            self.restarts += 1
        self._inode = status.st_ino
        self.size = status.st_size
        if status.st_size == self.offset:
            self.caught_up = True
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(limit)
            while b"\n" not in data and len(data) >= limit and limit < LONGEST_LINE:
                more = file.read(limit)  # one line is longer than that
                data += more
                limit *= 2
                if not more:
                    break
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LONGEST_LINE:
            self.offset += len(data)
            self._skipping = True
            return []
        start = self.offset
        self.offset += end
        self.caught_up = self.offset + (len(data) - end) >= self.size
        lines: list[Line] = []
        for piece in data[:end].split(b"\n")[:-1]:
            if self._skipping:  # the rest of a line that was too long
                self._skipping = False
            elif piece:
                lines.append(Line(start, piece))
            start += len(piece) + 1
        return lines

    @property
    def progress(self) -> float:
        """Share of the file that was read."""
        if self.caught_up:
            return 1.0
        return min(self.offset / self.size, 1.0) if self.size else 0.0


def clean(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are too large become null, lone surrogates and other kinds text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return str(value)


def parse(data: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it holds no JSON object."""
    try:
        value = loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_line(path: str | Path, offset: int, length: int) -> dict[str, Any] | None:
    """The object that lies at a place of a file; None if it does not lie there any more."""
    try:
        with Path(path).open("rb") as file:
            file.seek(offset)
            return clean(parse(file.read(length)))
    except OSError:
        return None


def sample_lines(path: str | Path, count: int, span: int = 16_384) -> list[dict[str, Any]]:
    """About `count` objects spread evenly over a file, the last one among them: a first look at a long file.

    Each is the first whole line after an evenly spaced place, found within `span` bytes.
    """
    found: dict[int, dict[str, Any]] = {}
    try:
        size = os.stat(path).st_size
        with Path(path).open("rb") as file:
            for index in range(count + 1):
                place = size * index // count if index < count else max(size - span, 0)
                file.seek(place)
                data = file.read(span)
                begin = 0 if place == 0 else data.find(b"\n") + 1
                if index == count:
                    begin = data.rfind(b"\n", 0, max(data.rfind(b"\n"), 0)) + 1
                end = data.find(b"\n", begin)
                if (place and not begin) or end < 0:
                    continue
                value = parse(data[begin:end])
                if value is not None:
                    found[place + begin] = value
    except OSError:
        return []
    return [found[place] for place in sorted(found)]


def newest(path: str | Path, test: Callable[[dict[str, Any]], bool], size: int = 65_536) -> dict[str, Any] | None:
    """The newest object in the last `size` bytes of a file that passes the test."""
    for piece in reversed(_last_lines(path, size)):
        value = parse(piece) if piece else None
        if value is not None and test(value):
            return clean(value)
    return None


def last_objects(path: str | Path, size: int) -> list[dict[str, Any]]:
    """The objects of the whole lines in the last `size` bytes of a file, in the order written."""
    return [value for piece in _last_lines(path, size) if piece and (value := parse(piece)) is not None]


def _last_lines(path: str | Path, size: int) -> list[bytes]:
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - size, 0))
            return file.read().split(b"\n")[0 if end <= size else 1 :]
    except OSError:
        return []


def read_json(path: Path, limit: int = 4 * 2**20) -> dict[str, Any] | None:
    """A small JSON file; None where there is none that can be read."""
    try:
        if path.stat().st_size > limit:
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return clean(value) if isinstance(value, dict) else None
