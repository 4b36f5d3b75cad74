"""Counts and times as the words of messages."""

from __future__ import annotations

import pytest

from pods_cluster.wording import age, counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "generator", "0 generators"),
        (1, "generator", "1 generator"),
        (2, "learner rank", "2 learner ranks"),
        (3, "micro-batch", "3 micro-batches"),
        (1024, "rollout", "1,024 rollouts"),
    ],
)
def test_a_count_and_its_noun_agree(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59.4, "59 s"), (60, "1 min"), (7200, "2 h"), (4 * 86400, "4 d")]
)
def test_a_time_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text
