"""Rows of the dataset on their way to the scorers: pickled once a row, sent once a process, not once a rollout."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from weakref import WeakValueDictionary

from pods_cluster.scoring.score import ScoreRequest

HELD_BYTES = 64 << 20
"""Size of the rows that a pool, and each of its processes, keeps for the next rollouts of the same groups."""
HELD_ROWS = 256
"""Most rows that are kept so."""


class Row:
    """The part of a request that all rollouts of a group share, pickled."""

    __slots__ = ("__weakref__", "_alive", "data", "number")

    _numbers = itertools.count()

    def __init__(self, request: ScoreRequest) -> None:
        self.data = _pickled(request)
        self.number = next(self._numbers)
        self._alive = request.columns, request.messages  # their ids are in the key of this row while it is known


class Rows:
    """The rows of a pool. One that a waiting request has is known, and so are the newest others, up to `HELD_BYTES`."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[object, ...], Row] = WeakValueDictionary()
        self._newest: OrderedDict[int, Row] = OrderedDict()
        self._bytes = 0

    def of(self, request: ScoreRequest) -> Row:
        """Return the row of a request: that of another one with the same `columns` and `messages` (the objects).

        Raises TypeError when a column cannot be pickled. Not for several threads at a time.
        """
        key = (id(request.columns), id(request.messages), request.prompt_text, request.answer)
        row = self._known.get(key)
        if row is None:
            row = self._known[key] = Row(request)
        if row.number not in self._newest:
            self._bytes += len(row.data)
        self._newest[row.number] = row
        self._newest.move_to_end(row.number)
        while (self._bytes > HELD_BYTES and len(self._newest) > 1) or len(self._newest) > HELD_ROWS:
            self._bytes -= len(self._newest.popitem(last=False)[1].data)
        return row


class SentRows:
    """Rows that one process holds, as its owner knows."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0

    def send(self, rows: Iterable[Row]) -> tuple[dict[int, bytes], list[int]]:
        """Return what the process does not have of these rows, and the numbers of others that it is to forget."""
        wanted = {row.number: row for row in rows}
        fresh = {number: row.data for number, row in wanted.items() if number not in self._sizes}
        for number, data in fresh.items():
            self._sizes[number] = len(data)
            self._bytes += len(data)
        for number in wanted:
            self._sizes.move_to_end(number)
        forget: list[int] = []
        while self._bytes > HELD_BYTES or len(self._sizes) > HELD_ROWS:
            number, size = next(iter(self._sizes.items()))
            if number in wanted:
                break
            del self._sizes[number]
            self._bytes -= size
            forget.append(number)
        return fresh, forget


def _pickled(request: ScoreRequest) -> bytes:
    row = (request.prompt_text, request.answer, request.messages, request.columns)
    try:
        return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        for name, value in request.columns.items():
            try:
                pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as cause:
                raise TypeError(
                    f"column {name!r} ({type(value).__name__}) cannot be sent to a scorer: {cause}. Drop the column "
                    "or keep plain values in it"
                ) from cause
        raise TypeError(f"the request cannot be sent to a scorer: {error}") from error
