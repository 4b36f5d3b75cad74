"""Prompts come the more often the nearer their past pass rate is to the target, and none is lost for ever."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.run import checkpoints
from pods_cluster.run.curriculum import MOST_SKIPPED, Curriculum, chance, share_of
from pods_cluster.selection.group_stats import GroupStats
from pods_cluster.types import GroupId
from tests.law import law
from tests.run import made_up_loop
from tests.run.made_up_loop import Loop
from tests.run.parts import loop_config
from tests.run.test_prompt_history import Epochs

shares = st.floats(0.01, 0.99)


def with_rates(rates: dict[int, float], target: float = 0.5, floor: float = 0.1, seed: int = 0) -> Curriculum:
    """Rows with these pass rates, seen in epoch 0."""
    made = Curriculum(target, floor, seed, share_of("right", (0.0, 1.0)))
    made.restore([row, rate, 0] for row, rate in rates.items())
    return made


def group(mean: float) -> GroupStats:
    return GroupStats(8, parts_mean={} if math.isnan(mean) else {"right": mean})


@law(100)
@given(shares, st.floats(0.01, 1.0), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20))
def test_the_chance_falls_with_the_distance_from_the_target(target: float, floor: float, rates: list[float]) -> None:
    assert chance(target, target, floor) == pytest.approx(1.0)
    for side in (sorted(r for r in rates if r <= target), sorted((r for r in rates if r >= target), reverse=True)):
        chances = [chance(rate, target, floor) for rate in side]
        assert chances == sorted(chances)
        assert all(floor <= each <= 1.0 for each in chances)


@law(50)
@given(st.floats(0.0, 1.0))
def test_at_a_half_it_is_the_variance_of_a_binary_reward(rate: float) -> None:
    assert chance(rate, 0.5, 1e-9) == pytest.approx(max(4 * rate * (1 - rate), 1e-9))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_prompts_come_as_often_as_their_chance_says(rate: float) -> None:
    rows = 3000
    made = with_rates(dict.fromkeys(range(rows), rate))
    came = sum(not made.skips(1, row) for row in range(rows)) / rows
    assert came == pytest.approx(chance(rate, 0.5, 0.1), abs=5 * 0.5 / rows**0.5)


@law(40)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), shares, st.floats(1e-6, 1.0), st.integers(0, 2**62))
def test_none_is_lost_for_ever_and_a_resumed_run_decides_the_same(
    row: int, rate: float, target: float, floor: float, seed: int
) -> None:
    made = with_rates({row: rate}, target, floor, seed)
    skipped = [made.skips(epoch, row) for epoch in range(1, MOST_SKIPPED + 2)]
    assert not skipped[-1]
    again = Curriculum(target, floor, seed, share_of("right", (0.0, 1.0)))
    again.restore(made.state())
    assert skipped == [again.skips(epoch, row) for epoch in range(1, MOST_SKIPPED + 2)]
    assert not made.skips(0, row)  # its own epoch: given back, it is served again
    assert not made.skips(1, row + 1)  # without a past it always comes


def test_a_pass_rate_is_the_mean_on_the_scale_of_the_range_and_newer_groups_count_more() -> None:
    made = Curriculum(0.5, 0.1, 0, share_of("right", (-1.0, 1.0)))
    made.saw(0, 7, group(0.0))
    assert made.state() == [[7, 0.5, 0]]
    made.saw(0, 7, group(1.0))  # the step was broken off and made again
    assert made.state() == [[7, 0.5, 0]]
    made.saw(2, 7, group(1.0))
    assert made.state() == [[7, 0.75, 2]]
    made.saw(3, 7, group(math.nan))  # no rollout has a valid value
    made.saw(3, 8, group(-5.0))
    assert made.state() == [[7, 0.75, 2], [8, 0.0, 3]]


def test_a_run_skips_what_is_solved_or_hopeless_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_up_loop, "Stream", Epochs)

    def rewards(group: GroupId, index: int) -> float:
        return (1.0, 0.0, float(index % 2), float(index % 2))[group.row % 4]

    config = loop_config("run.steps=40", "data.curriculum={floor: 0.000001}", "selector.no_signal=drop")
    loop = Loop(config, tmp_path, rewards)
    loop.main()
    records = loop.folder.read_metrics()
    assert sum(record.get("data/prompts_skipped", 0) for record in records) > 10
    saved = checkpoints.latest(loop.folder.checkpoints)
    assert saved is not None
    rates = checkpoints.read_state(saved).pass_rates
    assert {row % 4: rate for row, rate, _ in rates} == {0: 1.0, 1: 0.0, 2: 0.5, 3: 0.5}
    assert rates == loop.run.assembler.supply.pass_rates
    second = Loop(config, tmp_path / "second", rewards)
    asyncio.run(second.run.restore(saved))
    assert second.run.assembler.supply.pass_rates == rates
