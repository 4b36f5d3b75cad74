from itertools import pairwise

import pytest

from pods_cluster.learning.schedule import learning_rate


def rates(schedule, warmup=4, total=20):
    return [
        learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total)
        for step in range(total)
    ]


def test_warm_up_rises_evenly_to_the_peak():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates("constant", warmup=0)[0] == 2.0


def test_linear_and_cosine_fall_towards_zero_after_the_last_step():
    linear = rates("linear")
    assert linear[4:] == pytest.approx([2.0 * (16 - i) / 16 for i in range(16)])
    cosine = rates("cosine")
    assert cosine[12] == pytest.approx(1.0)
    assert all(a > b > 0 for a, b in pairwise(cosine[4:]))


def test_beyond_the_end_the_rate_stays_and_never_vanishes():
    last = learning_rate(19, peak=1.0, schedule="linear", warmup_steps=0, total_steps=20)
    assert learning_rate(500, peak=1.0, schedule="linear", warmup_steps=0, total_steps=20) == last > 0
    with pytest.raises(ValueError, match="-1"):
        learning_rate(-1, peak=1.0, schedule="linear", warmup_steps=0, total_steps=20)
