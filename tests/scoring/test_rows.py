"""Rows on their way to the scorers: a process always has what its calls need, and never more than it may keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.scoring import rows as sent
from pods_cluster.scoring.rows import Rows, SentRows
from pods_cluster.scoring.score import ScoreRequest


@contextmanager
def limits(size: int, count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent, "HELD_BYTES", size)
        patch.setattr(sent, "HELD_ROWS", count)
        yield


def request(number: int) -> ScoreRequest:
    return ScoreRequest("p", "c", columns={"text": "x" * 10 * number, "number": number})


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=30),
    st.integers(0, 500),
    st.integers(1, 6),
)
def test_a_process_holds_what_its_owner_believes(messages: list[list[int]], size: int, count: int) -> None:
    with limits(size, count):
        requests, pool, process = [request(number) for number in range(10)], Rows(), SentRows()
        held: dict[int, bytes] = {}
        for message in messages:
            rows = [pool.of(requests[number]) for number in message]
            fresh, forget = process.send(rows)
            assert not fresh.keys() & held.keys()
            for number in forget:
                del held[number]
            held |= fresh
            assert all(held[row.number] == row.data for row in rows)
            needed = {row.number for row in rows}
            kept = [len(data) for number, data in held.items() if number not in needed]
            assert not kept or (sum(map(len, held.values())) <= size and len(held) <= count)


def test_requests_of_one_row_share_it_while_one_of_them_waits() -> None:
    with limits(0, 1):
        pool, first, other = Rows(), request(3), request(4)
        waiting = pool.of(first)
        pool.of(other)
        same = ScoreRequest("p", "another completion", columns=first.columns)
        assert pool.of(same) is waiting
        number = waiting.number
        del waiting
        pool.of(other)
        assert pool.of(same).number != number


def test_rows_that_only_look_alike_are_apart() -> None:
    pool = Rows()
    one = {"number": 1}
    rows = [
        pool.of(ScoreRequest("p", "c", columns=one)),
        pool.of(ScoreRequest("q", "c", columns=one)),
        pool.of(ScoreRequest("p", "c", "answer", columns=one)),
        pool.of(ScoreRequest("p", "c", columns={"number": 1})),
        pool.of(ScoreRequest("p", "c", messages=[{"role": "user", "content": "p"}], columns=one)),
    ]
    assert len({row.number for row in rows}) == 5
