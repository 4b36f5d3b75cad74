"""Distribution of rollouts over workers."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pods_cluster.generation.distribute import ExpectedLengths, assign

LOADS = st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 5000), min_size=1)
PIECES = st.lists(st.tuples(st.integers(1, 16), st.floats(0, 3000)), max_size=20)


@given(PIECES, LOADS, st.booleans())
def test_every_rollout_has_one_worker(pieces: list[tuple[int, float]], loads: dict[str, int], spread: bool) -> None:
    shares = assign(pieces, loads, spread=spread)
    assert len(shares) == len(pieces)
    for (count, _), share in zip(pieces, shares, strict=True):
        assert sorted(place for places in share.values() for place in places) == list(range(count))
        assert all(share.values())
        assert share.keys() <= loads.keys()
        assert spread or len(share) == 1


def level_of(loads: list[int], tokens: float) -> float:
    """How high water stands that fills the lowest loads: by bisection."""
    low, high = float(min(loads)), min(loads) + tokens
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(0.0, middle - load) for load in loads) < tokens else (low, middle)
    return high


@given(PIECES.filter(len), LOADS)
@example(
    [(1, 291.0), (4, 1997.0), (13, 1949.0), (13, 1910.0), (8, 2451.0), (12, 2447.0)],
    {"a": 20, "b": 35, "c": 60, "d": 0},
)
def test_spread_over_workers_all_end_together(pieces: list[tuple[int, float]], loads: dict[str, int]) -> None:
    """Law: no worker is filled beyond the common level by more than a rollout."""
    shares = assign(pieces, loads, spread=True)
    ends = {name: float(load) for name, load in loads.items()}
    for (_, tokens), share in zip(pieces, shares, strict=True):
        for name, places in share.items():
            ends[name] += len(places) * tokens
    longest = max(tokens for _, tokens in pieces)
    filled = {name for share in shares for name in share}
    level = level_of(list(loads.values()), sum(count * tokens for count, tokens in pieces))
    assert all(ends[name] <= level + longest + 1e-6 * level for name in filled)


@given(st.lists(st.just((64, 10.0)), min_size=1, max_size=30), st.integers(1, 7))
def test_equal_groups_are_dealt_evenly(pieces: list[tuple[int, float]], workers: int) -> None:
    shares = assign(pieces, dict.fromkeys("abcdefg"[:workers], 0))
    counts = [sum(name in share for share in shares) for name in "abcdefg"[:workers]]
    assert max(counts) - min(counts) <= 1


def test_a_busy_worker_waits_its_turn() -> None:
    shares = assign([(4, 25), (4, 25), (4, 25)], {"busy": 250, "idle": 0})
    assert [next(iter(share)) for share in shares] == ["idle", "idle", "idle"]


def test_one_group_is_spread_over_all_workers() -> None:
    (share,) = assign([(7, 10)], {"a": 0, "b": 0, "c": 0}, spread=True)
    assert sorted(map(len, share.values())) == [2, 2, 3]


def test_six_groups_on_four_workers_leave_none_idle() -> None:
    """Whole groups would take two turns, with two workers idle in the second."""
    shares = assign([(16, 10)] * 6, dict.fromkeys("abcd", 0), spread=True)
    rollouts = dict.fromkeys("abcd", 0)
    for share in shares:
        for name, places in share.items():
            rollouts[name] += len(places)
    assert set(rollouts.values()) == {24}


def test_lengths_of_a_row_are_remembered_and_others_get_the_mean() -> None:
    lengths = ExpectedLengths()
    assert lengths.expected(3) is None
    lengths.seen(3, 100.0)
    lengths.seen(4, float("nan"))
    lengths.seen(5, 200.0)
    assert lengths.expected(3) == 100.0
    assert lengths.expected(9) == pytest.approx(102.0)
