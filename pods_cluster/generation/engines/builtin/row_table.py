"""Table of the rollouts in flight in the built-in engine: parallel arrays with one row each, packed at the front."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from pods_cluster.generation.engines.sampling import stream_key
from pods_cluster.types import FinishReason, Rollout, RolloutRequest, spans_of

_FIELDS: dict[str, Any] = {
    "prompt_length": np.int64,
    "length": np.int64,
    "limit": np.int64,
    "key": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "min_p": np.float32,
    "stop_class": np.int64,
    "first_version": np.int64,
    "last_version": np.int64,
    "started": np.float64,
}


class RowTable:
    """`count` rows in flight. Arrays hold more rows than that; only the first `count` mean anything.

    `ids` and `logprobs` begin with the prompt; `length` tokens of each row are set. `limit` is the length at which a row
    is full; `key` its random stream.
    """

    prompt_length: Int64[np.ndarray, " rows"]
    length: Int64[np.ndarray, " rows"]
    limit: Int64[np.ndarray, " rows"]
    key: UInt64[np.ndarray, " rows"]
    temperature: Float32[np.ndarray, " rows"]
    top_p: Float32[np.ndarray, " rows"]
    top_k: Int64[np.ndarray, " rows"]
    min_p: Float32[np.ndarray, " rows"]
    stop_class: Int64[np.ndarray, " rows"]
    first_version: Int64[np.ndarray, " rows"]
    last_version: Int64[np.ndarray, " rows"]
    started: Float64[np.ndarray, " rows"]

    def __init__(self) -> None:
        self.count = 0
        self.requests: list[RolloutRequest] = []
        self.ids: Int64[np.ndarray, "rows columns"] = np.zeros((0, 0), np.int64)
        self.logprobs: Float32[np.ndarray, "rows columns"] = np.zeros((0, 0), np.float32)
        self._updates: dict[str, list[tuple[int, int]]] = {}
        for name, dtype in _FIELDS.items():
            setattr(self, name, np.zeros(0, dtype))

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; what is there stays."""
        have_rows, have_columns = self.ids.shape
        if rows > have_rows or columns > have_columns:
            shape = (max(rows, have_rows), max(columns, have_columns))
            for name in ("ids", "logprobs"):
                old = getattr(self, name)
                grown = np.zeros(shape, old.dtype)
                grown[:have_rows, :have_columns] = old
                setattr(self, name, grown)
        if rows > have_rows:
            for name in _FIELDS:
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(rows - have_rows, old.dtype)]))

    def add(self, requests: Sequence[RolloutRequest], stop_classes: Sequence[int]) -> slice:
        """Append one row a request, its prompt set; returns where. Room must have been reserved."""
        rows = slice(self.count, self.count + len(requests))
        now = time.monotonic()
        for row, (request, stop_class) in enumerate(zip(requests, stop_classes, strict=True), start=self.count):
            sampling, prompt = request.sampling, request.prompt_ids
            self.ids[row, : len(prompt)] = prompt
            self.prompt_length[row] = self.length[row] = len(prompt)
            self.limit[row] = len(prompt) + sampling.max_tokens
            self.key[row] = stream_key(sampling.seed, request.group, request.index, request.start)
            self.temperature[row], self.top_p[row] = sampling.temperature, sampling.top_p
            self.top_k[row], self.min_p[row] = sampling.top_k, sampling.min_p
            self.stop_class[row] = stop_class
        self.first_version[rows] = self.last_version[rows] = -1
        self.started[rows] = now
        self.requests.extend(requests)
        self.count = rows.stop
        return rows

    def updated(self, version: int) -> None:
        """New weights came in place of `version`."""
        for row, request in enumerate(self.requests):
            made = int(self.length[row] - self.prompt_length[row])
            self._updates.setdefault(request.key, []).append((version, made))

    def append_tokens(
        self,
        rows: slice,
        tokens: Int64[np.ndarray, " rows"],
        logprobs: Float32[np.ndarray, " rows"],
        version: int,
    ) -> None:
        """One more token for each of `rows`."""
        index = np.arange(rows.start, rows.stop)
        length = self.length[rows]
        self.ids[index, length] = tokens
        self.logprobs[index, length] = logprobs
        fresh = length == self.prompt_length[rows]
        self.first_version[rows][fresh] = version
        self.last_version[rows] = version
        self.length[rows] += 1

    def completions(self, rows: slice) -> Iterator[tuple[tuple[str, ...], Int64[np.ndarray, " tokens"]]]:
        """The stop strings and the tokens made so far of each of `rows`."""
        for row in range(rows.start, rows.stop):
            yield self.requests[row].sampling.stop_strings, self.ids[row, self.prompt_length[row] : self.length[row]]

    def rollout(self, row: int, reason: FinishReason, version: int) -> Rollout:
        """The row as a rollout; `version` names the weights of a row that has no token yet."""
        request = self.requests[row]
        start, stop = int(self.prompt_length[row]), int(self.length[row])
        empty = start == stop
        last = version if empty else int(self.last_version[row])
        updates = self._updates.pop(request.key, ())
        return Rollout(
            group=request.group,
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=self.ids[row, start:stop].tolist(),
            logprobs=self.logprobs[row, start:stop].tolist() if request.sampling.logprobs else None,
            finish_reason=reason,
            first_version=version if empty else int(self.first_version[row]),
            last_version=last,
            seconds=time.monotonic() - float(self.started[row]),
            spans=spans_of(updates, last, stop - start),
        )

    def remove(
        self, rows: Int64[np.ndarray, " removed"]
    ) -> tuple[Int64[np.ndarray, " moved"], Int64[np.ndarray, " moved"]]:
        """Forget `rows` and close the gaps with the last rows; returns (source, target) of those that moved."""
        left = self.count - len(rows)
        gone = np.zeros(self.count, bool)
        gone[rows] = True
        target = np.flatnonzero(gone[:left])
        source = left + np.flatnonzero(~gone[left:])
        for name in ("ids", "logprobs", *_FIELDS):
            array = getattr(self, name)
            array[target] = array[source]
        for to, came_from in zip(target.tolist(), source.tolist(), strict=True):
            self.requests[to] = self.requests[came_from]
        del self.requests[left:]
        self.count = left
        return source, target
