"""Distribution of rollouts over workers."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pods_cluster.generation.distribute import FLOOR, ExpectedLengths, assign, relative_rates

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


RATES = st.fixed_dictionaries({name: st.floats(0.1, 10.0) for name in "abcdefg"})


@given(PIECES.filter(len), LOADS, RATES)
def test_spread_over_workers_of_different_speeds_all_end_together(
    pieces: list[tuple[int, float]], loads: dict[str, int], rates: dict[str, float]
) -> None:
    """Law: none ends later than the moment at which all tokens would be made together, by more than one rollout."""
    shares = assign(pieces, loads, spread=True, rates=rates)
    work = {name: float(load) for name, load in loads.items()}
    for (count, tokens), share in zip(pieces, shares, strict=True):
        assert sorted(place for places in share.values() for place in places) == list(range(count))
        for name, places in share.items():
            work[name] += len(places) * tokens
    tokens = sum(count * length for count, length in pieces)
    low, high = (
        min(load / rates[name] for name, load in loads.items()),
        max(load / rates[name] for name, load in loads.items()) + tokens / 0.1,
    )
    for _ in range(200):
        middle = (low + high) / 2
        made = sum(max(0.0, middle * rates[name] - load) for name, load in loads.items())
        low, high = (middle, high) if made < tokens else (low, middle)
    longest = max(length for _, length in pieces)
    for name in {name for share in shares for name in share}:
        assert work[name] / rates[name] <= high + longest / rates[name] + 1e-6 * high + 1e-9


@given(PIECES, LOADS, st.booleans(), st.floats(0.1, 10))
def test_equal_rates_change_nothing(
    pieces: list[tuple[int, float]], loads: dict[str, int], spread: bool, rate: float
) -> None:
    whole = [(count, float(round(tokens))) for count, tokens in pieces]
    rates = dict.fromkeys(loads, 2.0 ** round(rate))  # a power of two: no rounding that could turn a tie
    assert assign(whole, loads, spread=spread, rates=rates) == assign(whole, loads, spread=spread)


def test_a_card_of_three_times_the_speed_makes_three_times_the_groups() -> None:
    shares = assign([(8, 100.0)] * 40, {"fast": 0, "slow": 0}, rates={"fast": 1.0, "slow": 1 / 3})
    counts = [sum(name in share for share in shares) for name in ("fast", "slow")]
    assert counts == [30, 10]


def test_a_long_piece_waits_for_the_fast_worker_rather_than_go_to_an_idle_slow_one() -> None:
    (share,) = assign([(1, 1000.0)], {"fast": 500, "slow": 0}, rates={"fast": 1.0, "slow": 0.1})
    assert list(share) == ["fast"]


def test_workers_of_a_kind_share_their_best_rate() -> None:
    measured = {"a": ("H200", 50_000.0), "b": ("H200", 9_000.0), "c": ("L4", 5_000.0), "d": ("A10", 0.0)}
    rates = relative_rates(measured)
    assert rates == {"a": 1.0, "b": 1.0, "c": 0.1, "d": pytest.approx(27_500 / 50_000)}
    assert relative_rates({"a": ("H200", 50_000.0), "b": ("H200", 100.0)}) == {"a": 1.0, "b": 1.0}
    assert relative_rates({"a": ("cpu", 0.0), "b": ("H200", 0.0)}) == {"a": 1.0, "b": 1.0}
    assert relative_rates({"a": ("H200", 50_000.0), "b": ("L4", 1.0)})["b"] == FLOOR
    assert relative_rates({}) == {}


def test_lengths_of_a_row_are_remembered_and_others_get_the_mean() -> None:
    lengths = ExpectedLengths()
    assert lengths.expected(3) is None
    lengths.seen(3, 100.0)
    lengths.seen(4, float("nan"))
    lengths.seen(5, 200.0)
    assert lengths.expected(3) == 100.0
    assert lengths.expected(9) == pytest.approx(102.0)
