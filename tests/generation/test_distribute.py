"""Distribution of groups over workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.generation.distribute import assign

LOADS = st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 5000), min_size=1)


@given(st.lists(st.integers(1, 3000), max_size=20), st.integers(1, 16), LOADS, st.booleans())
def test_every_rollout_has_one_worker(tokens: list[int], size: int, loads: dict[str, int], spread: bool) -> None:
    shares = assign(tokens, size, loads, spread=spread)
    assert len(shares) == len(tokens)
    for share in shares:
        assert sorted(index for indices in share.values() for index in indices) == list(range(size))
        assert all(share.values())
        assert share.keys() <= loads.keys()
        assert spread or len(share) == 1


@given(st.lists(st.just(640), min_size=1, max_size=30), st.integers(1, 7))
def test_equal_groups_are_dealt_evenly(tokens: list[int], workers: int) -> None:
    shares = assign(tokens, 64, dict.fromkeys("abcdefg"[:workers], 0))
    counts = [sum(name in share for share in shares) for name in "abcdefg"[:workers]]
    assert max(counts) - min(counts) <= 1


def test_a_busy_worker_waits_its_turn() -> None:
    shares = assign([100, 100, 100], 4, {"busy": 250, "idle": 0})
    assert [next(iter(share)) for share in shares] == ["idle", "idle", "idle"]


def test_one_group_is_spread_over_all_workers() -> None:
    (share,) = assign([100], 7, {"a": 0, "b": 0, "c": 0}, spread=True)
    assert sorted(map(len, share.values())) == [2, 2, 3]
