"""Append-only JSON lines: a writer that never raises, readers that live with a torn line."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PENDING_BYTES = 64 * 2**20
"""Lines that cannot be written now wait in memory up to this size."""


class JsonLinesWriter:
    """Appends one JSON object a line, each handed to the system at once (unbuffered).

    A failure to write (disk full, folder gone) is counted in `failed_writes`, told once through `on_warning`, and the
    line waits for the next `write`, `retry` or `close`; a line written in part goes on where it stopped. When more than
    `PENDING_BYTES` wait, new lines are given up and counted in `dropped_lines`.
    """

    def __init__(
        self, path: str | Path, *, on_warning: Callable[[str], None] | None = None, limit: int = PENDING_BYTES
    ) -> None:
        self.path = Path(path)
        self.failed_writes = 0
        self.dropped_lines = 0
        self._on_warning = on_warning or logger.warning
        self._limit = limit
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._failing = False
        self._descriptor: int | None = None

    def write(self, value: Mapping[str, Any]) -> bool:
        """Append a line; true if it and all before it are written."""
        line = encode(value)
        if self._pending and self._pending_bytes + len(line) > self._limit:
            self.dropped_lines += 1
            if self.dropped_lines == 1:
                self._on_warning(f"{self.path}: {self._pending_bytes} bytes wait to be written; new lines are given up")
        else:
            self._pending.append(line)
            self._pending_bytes += len(line)
        return self.retry()

    def retry(self) -> bool:
        """Write what waits; true if nothing does any more."""
        if not self._pending:
            return True
        try:
            descriptor = self._open()
            while self._pending:
                head = self._pending[0]
                written = os.write(descriptor, head)
                self._pending_bytes -= written
                if written == len(head):
                    self._pending.popleft()
                else:
                    self._pending[0] = head[written:]
        except OSError as error:
            self.failed_writes += 1
            if not self._failing:
                self._failing = True
                self._on_warning(
                    f"{self.path}: cannot be written ({error.strerror or error}); training goes on, lines wait in "
                    f"memory and are tried again: free space or restore the folder"
                )
            return False
        if self._failing:
            self._failing = False
            self._on_warning(f"{self.path}: is written again; {self.dropped_lines} lines were given up")
        return True

    @property
    def waiting(self) -> int:
        """Lines not yet written."""
        return len(self._pending)

    def close(self) -> None:
        """A last try, then let go of the file."""
        self.retry()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports a late failure here
                self.failed_writes += 1
                self._on_warning(f"{self.path}: closing failed ({error.strerror or error})")

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                # after a crash the last line may be half-written: end it, so that it spoils only itself
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    os.write(descriptor, b"\n")
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor


def encode(value: Mapping[str, Any]) -> bytes:
    """One line of strict JSON for any mapping: what JSON does not know becomes a list, null or its text."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any, depth: int = 0) -> Any:
    """Numpy and torch values, sets, NaN, keys that are no texts, and as a last resort the text of a value."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth < 32:
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(item, depth + 1) for item in value]
        if hasattr(value, "tolist"):
            return _plain(value.tolist(), depth + 1)
    return str(value)


class JsonLinesTail:
    """Follows a file that another process appends to: `poll` returns the objects of the lines completed since then.

    A file that is not there yet, or was replaced by a shorter one, is read from its beginning.
    Lines that are no JSON object are skipped and counted in `bad_lines`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.bad_lines = 0

    def poll(self, limit: int = 64 * 2**20) -> list[dict[str, Any]]:
        """New objects, of at most about `limit` bytes of lines; call again while it returns some."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0
                while True:
                    file.seek(self.offset)
                    data = file.read(limit)
                    end = data.rfind(b"\n") + 1
                    if end or len(data) < limit:
                        break
                    limit *= 2  # one line is longer than that
        except FileNotFoundError:
            return []
        self.offset += end
        return list(self._parse(data[:end]))

    def _parse(self, data: bytes) -> Iterator[dict[str, Any]]:
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            else:
                self.bad_lines += 1


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """All objects of a file ([] if there is none); a half-written last line and broken lines are left out."""
    tail = JsonLinesTail(path)
    values: list[dict[str, Any]] = []
    while batch := tail.poll():
        values += batch
    # the writer ended between an object and its newline
    try:
        with Path(path).open("rb") as file:
            file.seek(tail.offset)
            rest = file.read()
        last = json.loads(rest) if rest.strip() else None
    except (OSError, ValueError):
        last = None
    if isinstance(last, dict):
        values.append(last)
    return values
