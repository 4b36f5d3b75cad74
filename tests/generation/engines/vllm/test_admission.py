"""The gate that lets new rollouts into a full engine in portions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.engines.vllm.admission import PORTION, AdmissionGate, portion_of
from tests.law import law


def test_without_a_word_every_free_place_is_filled_as_vllm_does_it() -> None:
    assert portion_of(None) == portion_of({"another": 3}) == 1
    assert portion_of({PORTION: 64}) == 64


def test_a_portion_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places: it must be at least 1"):
        AdmissionGate(0)


def test_it_stays_open_until_the_places_are_full_or_nobody_waits() -> None:
    gate = AdmissionGate(4)
    assert not gate.opens(3)
    assert gate.opens(4)
    gate.entered(free=2, waiting=5)  # the step's budget of tokens was used up
    assert gate.opens(2)
    gate.entered(free=0, waiting=3)
    assert not gate.opens(3)
    assert gate.opens(4)
    gate.entered(free=3, waiting=0)
    assert not gate.opens(3)


@law(60)
@given(
    places=st.integers(1, 40),
    portion=st.integers(1, 40),
    budget=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=120),
)
def test_everyone_gets_in_and_a_full_engine_admits_a_portion_at_a_time(
    places: int, portion: int, budget: int, lengths: list[int]
) -> None:
    """`budget` may enter in a step; each runs for so many steps. All wait from the start, as in an engine kept full."""
    portion = min(portion, places)
    gate = AdmissionGate(portion)
    waiting, running = list(lengths), list[int]()
    since = places  # free places when the gate opened
    going_on = False
    for _ in range(2 * sum(lengths) + 2):
        free = places - len(running)
        entering = min(free, len(waiting), budget) if gate.opens(free) else 0
        if entering and not going_on:
            since = free
            assert since >= portion
        running += waiting[:entering]
        del waiting[:entering]
        gate.entered(places - len(running), len(waiting))
        going_on = bool(entering) and len(running) < places and bool(waiting)
        running = [left - 1 for left in running if left > 1]
    assert not waiting
    assert not running
