"""Every group takes one slot and gives it back once, whatever becomes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.run.staleness_ledger import Ledger, LedgerError
from pods_cluster.types import Fate, GroupId


def test_slots_are_bounded_by_staleness():
    ledger = Ledger(prompts_per_step=4, staleness=1)
    for row in range(8):
        ledger.issue(GroupId(0, row), version=0)
    assert ledger.free == 0
    with pytest.raises(LedgerError, match="all 8 slots"):
        ledger.issue(GroupId(0, 8), version=0)


def test_a_fate_is_counted_once():
    ledger = Ledger(prompts_per_step=2, staleness=0)
    ledger.issue(GroupId(0, 0), version=3)
    ledger.end(GroupId(0, 0), Fate.TRAINED)
    with pytest.raises(LedgerError, match="holds no slot"):
        ledger.end(GroupId(0, 0), Fate.LOST)
    assert ledger.fates == {Fate.TRAINED: 1}


def test_an_attempt_is_another_group():
    ledger = Ledger(prompts_per_step=2, staleness=0)
    ledger.issue(GroupId(0, 0, 0), version=0)
    ledger.issue(GroupId(0, 0, 1), version=0)
    with pytest.raises(LedgerError, match="in flight already"):
        Ledger(2, 0, in_flight={GroupId(0, 0): 0}).issue(GroupId(0, 0), version=0)
    assert list(ledger.in_flight) == [GroupId(0, 0, 0), GroupId(0, 0, 1)]


@given(
    prompts=st.integers(1, 6),
    staleness=st.integers(0, 3),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from(list(Fate))), max_size=200),
)
def test_no_slot_leaks(prompts: int, staleness: int, moves: list[tuple[bool, int, Fate]]):
    """Law: issued = in flight + sum of fates, and in flight never exceeds the capacity."""
    ledger = Ledger(prompts, staleness)
    row = 0
    for issue, pick, fate in moves:
        if issue and ledger.free:
            ledger.issue(GroupId(0, row), version=row)
            row += 1
        elif not issue and ledger.in_flight:
            ledger.end(list(ledger.in_flight)[pick % len(ledger.in_flight)], fate)
        assert ledger.issued == len(ledger.in_flight) + sum(ledger.fates.values())
        assert len(ledger.in_flight) <= ledger.capacity
        assert ledger.free == ledger.capacity - len(ledger.in_flight)
    restored = Ledger(prompts, staleness)
    restored.restore(ledger.state())
    assert restored.fates == ledger.fates
    assert restored.issued == ledger.issued
