"""Time to a target and the speed-up: known answers, laws, the published figures, and an interval counted by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.telemetry.speedup import (
    Points,
    Seeded,
    Target,
    difference,
    first_reaching,
    on_common_grid,
    speed_up,
)
from tests.law import law


def ramp(reaches: float, at: float, stop: float = 100.0, top: float = 1.0) -> Points:
    """A curve that rises from 0 straight to `reaches` at x = `at`, and on to `top` at the end."""
    return np.array([0.0, at, stop]), np.array([0.0, reaches, top])


def test_a_target_between_two_points_is_reached_on_the_line() -> None:
    grid, means = np.array([0.0, 10.0, 20.0]), np.array([[0.0, 0.5, 1.0], [0.9, 0.2, 0.3]])
    assert first_reaching(grid, means, 0.75).tolist() == [15.0, 0.0]
    assert first_reaching(grid, means, 0.75, hold=True).tolist() == [20.0, 0.0]
    assert first_reaching(grid, means, 1.1).tolist() == [math.inf, math.inf]


def test_the_grid_has_every_point_that_all_curves_cover() -> None:
    curves = [(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), (np.array([1.0, 5.0]), np.array([0.0, 4.0]))]
    grid, values = on_common_grid(curves)
    assert grid.tolist() == [1, 2, 4]
    assert values.tolist() == [[1, 2, 4], [0, 1, 3]]
    assert on_common_grid(curves, hold=True)[1].tolist() == [[0, 2, 4], [0, 0, 0]]
    with pytest.raises(ValueError, match="share no range"):
        on_common_grid([curves[0], (np.array([6.0, 7.0]), np.zeros(2))])


def test_a_gain_counts_from_the_baselines_start() -> None:
    baseline = {0: (np.array([0.0, 10.0]), np.array([0.2, 0.4])), 1: (np.array([0.0, 10.0]), np.array([0.3, 0.5]))}
    arm = {0: (np.array([0.0, 10.0]), np.array([0.2, 0.6])), 1: (np.array([0.0, 10.0]), np.array([0.3, 0.7]))}
    found = speed_up(baseline, arm, Target(gain=0.1))
    assert found.target == pytest.approx(0.35)
    assert (found.baseline_at, found.arm_at, found.value) == pytest.approx((5.0, 2.5, 2.0))
    # each resample has a start of its own: the rise is the same, and so the times
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))
    assert speed_up(baseline, arm, Target(0.5, gain=0.1)).target == 0.5


def test_a_known_speed_up() -> None:
    baseline = {seed: ramp(0.8, 40 + seed) for seed in range(3)}
    arm = {seed: ramp(0.8, 20 + seed / 2) for seed in range(3)}
    found = speed_up(baseline, arm, Target(0.4))
    assert found.target == 0.4
    assert found.paired
    assert found.seeds == 3
    # each curve reaches half of 0.8 half-way; the mean of the lines is a line up to the first knot
    assert found.by_seed == pytest.approx({0: 2.0, 1: 2.0, 2: 2.0})
    assert found.value == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))
    assert found.baseline_at == pytest.approx(0.4 / np.mean([0.8 / (40 + seed) for seed in range(3)]))


rises = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=8)


@given(st.lists(rises, min_size=2, max_size=4), st.floats(0.25, 4.0))
@law(60)
def test_an_arm_that_is_the_baseline_at_another_pace_is_so_much_sooner(steps: list[list[float]], pace: float) -> None:
    length = min(map(len, steps))
    x = np.arange(length + 1, dtype=float)
    curves = [np.concatenate([[0.0], np.cumsum(rise[:length])]) for rise in steps]
    baseline = {seed: (x, y) for seed, y in enumerate(curves)}
    arm = {seed: (x / pace, y) for seed, y in enumerate(curves)}
    found = speed_up(baseline, arm, resamples=50)
    assert found.value == pytest.approx(pace)
    assert found.low == pytest.approx(pace)
    assert found.high == pytest.approx(pace)
    back = speed_up(arm, baseline, Target(found.target), resamples=50)
    assert back.value == pytest.approx(1 / pace)


def test_an_arm_that_never_gets_there_is_not_left_out() -> None:
    baseline = {seed: ramp(0.9, 50) for seed in range(4)}
    poor = {seed: ramp(0.1, 50, top=0.2) for seed in range(4)}
    found = speed_up(baseline, poor, Target(0.8))
    assert (found.arm_at, found.value) == (None, None)
    assert (found.low, found.high, found.missed) == (0.0, 0.0, (0.0, 1.0))
    other = speed_up(poor, baseline, Target(0.8))
    assert (other.baseline_at, other.value) == (None, None)
    assert other.low == math.inf
    assert (found.at_least, found.at_most) == (None, pytest.approx(found.baseline_at / 100))
    assert (other.at_least, other.at_most) == (pytest.approx(100 / other.arm_at), None)
    neither = speed_up(poor, poor, Target(0.8))
    assert (neither.at_least, neither.at_most) == (None, None)
    assert (neither.low, neither.high, neither.missed) == (None, None, (1.0, 1.0))
    assert all(map(math.isnan, neither.by_seed.values()))


def test_some_seeds_that_never_get_there_open_the_interval() -> None:
    baseline = {seed: ramp(0.8, 40, top=0.8) for seed in range(3)}
    arm = {0: ramp(0.8, 10, top=0.8), 1: ramp(0.8, 10, top=0.8), 2: ramp(0.1, 10, top=0.1)}
    found = speed_up(baseline, arm, Target(0.7))
    assert found.value is None
    assert found.low == 0.0
    assert found.high is not None
    assert found.high > 3
    # the mean of three gets there where the third was not drawn: (2/3)^3 of the resamples
    assert found.missed == pytest.approx((0.0, 1 - 8 / 27), abs=0.05)


def test_where_neither_mean_gets_there_single_seeds_make_no_interval() -> None:
    slow = {seed: ramp(0.1, 50, top=0.2) for seed in range(4)}
    found = speed_up({**slow, 0: ramp(0.9, 50)}, slow, Target(0.8))
    assert found.missed[0] < 1  # a resample of the one good seed alone does get there
    assert (found.value, found.low, found.high, found.at_least, found.at_most) == (None,) * 5


def test_the_interval_is_that_of_all_resamples() -> None:
    """Three seeds have 27 resamples: the quantiles of the drawn ones are those of all."""
    baseline = {0: ramp(0.9, 30), 1: ramp(0.9, 40), 2: ramp(0.9, 60)}
    arm = {0: ramp(0.9, 20), 1: ramp(0.9, 12), 2: ramp(0.9, 25)}

    def mean(curves: Seeded, drawn: tuple[int, ...]) -> Points:
        grid, values = on_common_grid(list(curves.values()))
        return grid, values[list(drawn)].mean(axis=0)

    ratios = []
    for drawn in itertools.product(range(3), repeat=3):
        once = speed_up({0: mean(baseline, drawn)}, {0: mean(arm, drawn)}, Target(0.5))
        assert once.value is not None
        ratios.append(once.value)
    ratios.sort()
    found = speed_up(baseline, arm, Target(0.5))
    # 2.5 % of 27 lies within the first, drawn with chance 1/27 = 3.7 %
    assert found.value is not None
    assert found.low == pytest.approx(ratios[0])
    assert found.high == pytest.approx(ratios[-1])
    assert ratios[0] < found.value < ratios[-1]


def test_one_seed_has_no_interval_and_unmatched_seeds_are_not_paired() -> None:
    alone = speed_up({3: ramp(0.9, 30)}, {3: ramp(0.9, 10)}, Target(0.9))
    assert (alone.value, alone.low, alone.high) == (pytest.approx(3.0), None, None)
    apart = speed_up({1: ramp(0.9, 30), 2: ramp(0.9, 36)}, {3: ramp(0.9, 10), 4: ramp(0.9, 12)}, Target(0.9))
    assert not apart.paired
    assert apart.by_seed == {}
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < 3.0 < apart.high
    partly = speed_up({1: ramp(0.9, 30), 2: ramp(0.9, 36)}, {2: ramp(0.9, 18), 9: ramp(0.9, 1)}, Target(0.9))
    assert partly.by_seed == pytest.approx({2: 2.0})
    with pytest.raises(ValueError, match="at least one curve"):
        speed_up({}, {1: ramp(0.9, 1)})


# Setting: points of the grid, unit; GRPO's best, when it first is at 99 % of it; PODS's best and when; the ratio. From
# the curves that were released with the paper (one point each 30, 10 or 2 minutes).
PUBLISHED = {
    "a, GSM8K, Qwen 3B": (np.arange(0, 6.5, 0.5), 81.64, 3.0, 82.63, 1.5, 2.00),
    "b, GSM8K, Llama 3B": (np.arange(10) / 6, 39.13, 1.5, 55.88, 0.5, 3.00),
    "c, MATH-500": (np.arange(0, 6.5, 0.5), 48.90, 5.0, 50.35, 2.5, 2.00),
    "e, GSM8K, 8 H100": (np.arange(0, 32, 2.0), 82.56, 24.0, 84.12, 14.0, 1.71),
    "f, GSM8K, 8 A100": (np.arange(0, 32, 2.0), 87.24, 28.0, 87.94, 16.0, 1.75),
}
THRESHOLDS = {"a": 80.82, "b": 38.74, "c": 48.41, "e": 81.73, "f": 86.37}


@pytest.mark.parametrize("setting", PUBLISHED)
def test_the_published_speed_ups(setting: str) -> None:
    grid, best, reached, pods_best, pods_reached, wanted = PUBLISHED[setting]
    threshold = THRESHOLDS[setting[0]]

    def published(top: float, at: float) -> Points:
        """The released curve as far as the table tells it: below the threshold before `at`, `top` at its best."""
        place = int(np.flatnonzero(np.isclose(grid, at))[0])
        y = np.linspace(20.0, threshold - 0.3, len(grid))
        y[place:] = threshold + 0.01
        y[-1 if place < len(grid) - 1 else place] = top
        return grid, y

    found = speed_up({0: published(best, reached)}, {0: published(pods_best, pods_reached)}, Target(), hold=True)
    assert found.target == pytest.approx(threshold, abs=0.006)
    assert found.baseline_at == pytest.approx(reached)
    assert found.arm_at == pytest.approx(pods_reached)
    assert found.value == pytest.approx(wanted, abs=0.005)


def test_the_difference_is_at_the_last_common_point() -> None:
    baseline = {seed: (np.array([0.0, 10.0]), np.array([0.0, 0.5])) for seed in range(3)}
    arm = {seed: (np.array([0.0, 20.0]), np.array([0.0, 1.2 + 0.2 * seed])) for seed in range(3)}
    found = difference(baseline, arm)
    assert found.at == 10.0
    assert found.value == pytest.approx(0.2)
    half = 4.303 * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))
    with pytest.raises(ValueError, match="a seed that both arms have"):
        difference(baseline, {7: arm[0]})
