"""Rows that are read from their files when they are served: nothing is loaded, converted or cached before.

JSONL and parquet files, here or on the hub. Rows have numbers, as those of a table have: the files say how many there are
(parquet's metadata; of JSONL the places of the lines are found in one pass, eight bytes a row). They are read in blocks of
`data.shuffle_buffer` rows, of which two are in memory at most. An epoch's order puts the blocks into a seeded order and
shuffles within each: a function of (seed, epoch), so that a run resumes at its position exactly.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.order import block_order
from pods_cluster.data.written_values import written_row

BLOCKS = 2
"""Blocks in memory: the one that is served, and one for rows that come again."""
_CHUNK = 1 << 24
_FIRST_ROWS = 32


class RowFile(Protocol):
    """A file of rows."""

    path: str
    rows: int

    def read(self, start: int, stop: int) -> list[Any]:
        """Rows from `start` to `stop`, as `row` takes them."""
        ...

    def row(self, raw: Any, index: int, /) -> Mapping[str, Any]:
        """One of these rows. Raises RowError, which names it `index`."""
        ...


class JsonLines:
    """A JSONL file; blank lines are no rows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts, self._end = _line_starts(path)
        self.rows = len(self._starts)

    def read(self, start: int, stop: int) -> list[bytes]:
        if start >= stop:
            return []
        ends = [*self._starts[start + 1 : stop].tolist(), self._end if stop >= self.rows else int(self._starts[stop])]
        begin = int(self._starts[start])
        with _open(self.path) as file:
            file.seek(begin)
            data = file.read(ends[-1] - begin)
        starts = [begin, *ends[:-1]]
        return [data[first - begin : last - begin] for first, last in zip(starts, ends, strict=True)]

    def row(self, raw: bytes, index: int, /) -> Mapping[str, Any]:
        try:
            found = json.loads(raw)
        except ValueError as error:  # also of bytes that are no UTF-8
            raise RowError(
                f"data.path: row {index} of {self.path!r} is no JSON ({error}); correct or remove it"
            ) from error
        if not isinstance(found, dict):
            raise RowError(f"data.path: row {index} of {self.path!r} is no object; write one {{…}} a line")
        return found


class Parquet:
    """A parquet file, of which the row groups that hold the wanted rows are read."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as parquet

        self.path = path
        try:
            with _open(path) as file:
                metadata = parquet.ParquetFile(file).metadata
        except Exception as error:
            raise DataError(f"data.path: {path!r} cannot be read as parquet ({error}); write the file again") from error
        self._ends = np.cumsum(
            [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        ).tolist()
        self.rows = int(metadata.num_rows)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        import pyarrow.parquet as parquet

        if start >= stop:
            return []
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        offset = self._ends[first - 1] if first else 0
        with _open(self.path) as file:
            table = parquet.ParquetFile(file).read_row_groups(list(range(first, last + 1)))
        return table.slice(start - offset, stop - start).to_pylist()

    def row(self, raw: dict[str, Any], _: int, /) -> Mapping[str, Any]:
        return raw


class StreamedRows:
    """The rows of several files one after the other, from `span`, read in blocks of `block` rows."""

    def __init__(self, files: Sequence[RowFile], block: int, span: range | None = None) -> None:
        self.files = tuple(files)
        self._ends = np.cumsum([file.rows for file in self.files]).tolist() if files else []
        self.whole = int(self._ends[-1]) if self._ends else 0
        self.span = range(self.whole) if span is None else span
        self.block = block
        self._blocks: OrderedDict[int, list[tuple[RowFile, Any]]] = OrderedDict()
        first = [self[index] for index in range(min(_FIRST_ROWS, len(self)))]
        self.column_names = list(dict.fromkeys(name for row in first for name in row))

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Row `index`. Raises RowError where its line is no JSON, and what the reading of a file raises."""
        file, raw = self._raw(index)
        return file.row(raw, index)

    def answers(self, keys: Sequence[str]) -> WrittenAnswers | None:
        """The values under `keys` as the files have them, where they are JSON."""
        return WrittenAnswers(self, keys) if all(isinstance(file, JsonLines) for file in self.files) else None

    def as_written(self, index: int, keys: Sequence[str]) -> str | None:
        """The value under `keys` of a row of JSON, number by number as it stands there."""
        return written_row(self._raw(index)[1], keys)

    def order(self, seed: int, epoch: int) -> Int64[np.ndarray, " rows"]:
        """A seeded order of an epoch that reads each block once."""
        return block_order(seed, epoch, len(self), self.block)

    def fingerprint(self) -> dict[str, Any]:
        """Tell these rows from others: by their number, the columns, and the names, sizes and first rows of the files."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{Path(file.path).name} {file.rows}\n".encode())
        for index in range(min(_FIRST_ROWS, len(self))):
            digest.update(json.dumps(self[index], sort_keys=True, default=str).encode())
        return {"rows": len(self), "columns": sorted(self.column_names), "sample": digest.hexdigest()[:32]}

    def _raw(self, index: int) -> tuple[RowFile, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = index // self.block
        if number not in self._blocks:
            while len(self._blocks) >= BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[number] = self._read(number)
        self._blocks.move_to_end(number)
        return self._blocks[number][index - number * self.block]

    def _read(self, number: int) -> list[tuple[RowFile, Any]]:
        start = self.span.start + number * self.block
        stop = min(start + self.block, self.span.stop)
        found: list[tuple[RowFile, Any]] = []
        for file, end in zip(self.files, self._ends, strict=True):
            begin = end - file.rows
            part = (
                file.read(max(start - begin, 0), min(stop - begin, file.rows)) if begin < stop and start < end else []
            )
            found += [(file, raw) for raw in part]
        return found


class WrittenAnswers(Sequence[str | None]):
    """The answers of streamed rows of JSON as the files have them."""

    def __init__(self, rows: StreamedRows, keys: Sequence[str]) -> None:
        self._rows, self._keys = rows, tuple(keys)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows.as_written(index, self._keys)


def open_files(paths: Sequence[str]) -> list[RowFile]:
    """The files by their endings. Raises DataError for one of another format."""
    found: list[RowFile] = []
    for path in paths:
        ending = Path(path.partition("?")[0]).suffix.lower()
        if ending in (".jsonl", ".ndjson"):
            found.append(JsonLines(path))
        elif ending == ".parquet":
            found.append(Parquet(path))
        else:
            raise DataError(
                f"data.streaming: {path!r} is neither a JSONL nor a parquet file; convert it, or set data.streaming: false"
            )
    return found


def _open(path: str) -> Any:
    """A file here or at an address that fsspec knows (hf://…)."""
    if "://" not in path:
        return open(path, "rb")
    from fsspec.core import url_to_fs

    system, name = url_to_fs(path)
    return system.open(name, "rb")


def _line_starts(path: str) -> tuple[Int64[np.ndarray, " rows"], int]:
    """Offsets (bytes) at which a file's lines begin, blank ones left out, and its end."""
    starts: list[Int64[np.ndarray, " lines"]] = []
    position, begin, blank_so_far = 0, 0, True
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
            values = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(values == ord("\n"))
            solid = np.flatnonzero(~np.isin(values, np.frombuffer(b" \t\r\n", np.uint8)))
            lines = np.concatenate([[0], ends + 1])
            filled = np.diff(np.searchsorted(solid, [*lines.tolist(), len(values)])) > 0
            filled[0] |= not blank_so_far
            begins = lines + position
            begins[0] = begin
            starts.append(begins[:-1][filled[:-1]])
            begin, blank_so_far = int(begins[-1]), not bool(filled[-1])
            position += len(values)
    if not blank_so_far:
        starts.append(np.array([begin]))
    return np.concatenate(starts).astype(np.int64) if starts else np.zeros(0, np.int64), position
