"""The bound on restarts, and their back-off."""

from __future__ import annotations

import pytest

from pods_cluster.run.errors import RunError
from pods_cluster.run.restarts import GOOD_STEPS, LONGEST_WAIT, Restarts


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer() -> None:
    restarts = Restarts(7)
    waits = [restarts.failed("a rank died", 0) for _ in range(7)]
    assert waits == [0.0, 5.0, 15.0, 45.0, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_the_end_names_the_first_cause_and_the_bound() -> None:
    restarts = Restarts(2)
    restarts.failed("rank 1 died", 5)
    restarts.failed("no room", 5)
    with pytest.raises(RunError, match=r"^rank 1 died\. .* 2 times \(run\.restarts\) .*the last time: still no room"):
        restarts.failed("still no room", 5)


def test_good_steps_begin_the_count_anew() -> None:
    restarts = Restarts(1)
    for step in range(0, 5 * GOOD_STEPS, GOOD_STEPS):
        assert restarts.failed(f"fault at {step}", step) == 0.0
        restarts.going_on(step)
    restarts.going_on(step)
    with pytest.raises(RunError, match=f"^fault at {step}"):
        restarts.failed("one step too early", step + GOOD_STEPS - 1)


def test_none_is_allowed() -> None:
    with pytest.raises(RunError, match=r"^a rank died \(run\.restarts: 0 "):
        Restarts(0).failed("a rank died", 3)
