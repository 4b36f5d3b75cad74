"""Failures of rewards are added up over workers, those that are gone included, and told at 1, 10, 100, … of them."""

from __future__ import annotations

import itertools
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.run.reward_watch import RewardWatch
from pods_cluster.scoring.score import FailureKind
from pods_cluster.scoring.scorer_stats import ScorerStats
from pods_cluster.scoring.scoring_totals import ScoringTotals
from tests.run.parts import loop_config

ERROR, TIMEOUT = FailureKind.ERROR, FailureKind.TIMEOUT


class Told:
    """A recorder that keeps counts and texts of its events."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.texts: list[str] = []

    def event(self, kind: str, text: str, *, level: str, count: int, share: float, **fields: str) -> None:
        assert (kind, level) == ("reward_failed", "warning")
        assert set(fields) == {"reward", "failure", "message"}
        assert 0 < share <= 1
        self.counts.append(count)
        self.texts.append(text)


def stats(
    scored: int, errors: int = 0, timeouts: int = 0, text: str = "KeyError: 'level' (r.py:2 in f)"
) -> ScorerStats:
    failures = {"judge": {kind: n for kind, n in ((ERROR, errors), (TIMEOUT, timeouts)) if n}}
    samples = {"judge": {ERROR: [text] if errors else [], TIMEOUT: ["ran past 10 s"] if timeouts else []}}
    return ScorerStats(scored, errors + timeouts, 0, failures, {}, samples)


def test_counts_of_workers_that_come_and_go() -> None:
    totals = ScoringTotals()
    totals.update({"a": stats(10, 2), "b": stats(20, 5, 1), "c": None})
    assert totals.scored == 30
    first, second = totals.failures()
    assert (first.reward, first.kind, first.count, first.scored) == ("judge", ERROR, 7, 30)
    assert (second.kind, second.count) == (TIMEOUT, 1)
    totals.worker_gone("b")
    totals.worker_gone("unknown")
    totals.update({"a": stats(15, 4)})
    assert [(f.kind, f.count, f.scored) for f in totals.failures()] == [(ERROR, 9, 35), (TIMEOUT, 1, 35)]
    assert (totals.missing, totals.valid) == (10, 25)
    totals.update({"a": stats(3, 3)})  # a new process under the old name
    assert (totals.missing, totals.valid) == (13, 25)
    assert totals.failures()[0].count == 12
    assert totals.scored == 38


def test_the_text_names_reward_kind_count_share_and_cause() -> None:
    totals = ScoringTotals()
    totals.update({"a": stats(640, 640)})
    failure = totals.failures()[0]
    assert failure.share == 1.0
    assert (
        str(failure) == "reward 'judge' gave no number in 640 of 640 scorings (error): KeyError: 'level' (r.py:2 in f)"
    )


@given(st.lists(st.integers(0, 400), max_size=60))
def test_told_at_the_first_and_then_each_time_ten_times_as_often(steps: list[int]) -> None:
    recorder = Told()
    watch, totals, count = RewardWatch(cast(Any, recorder), loop_config(), lambda: 0.0), ScoringTotals(), 0
    for more in steps:
        count += more
        totals.update({"a": stats(count + 5, count)})
        watch.look(totals)
    assert bool(recorder.counts) == (count > 0)
    assert all(later >= 10 * earlier for earlier, later in itertools.pairwise(recorder.counts))
    assert not recorder.counts or count < 10 * recorder.counts[-1]
    assert watch.describe() == (str(totals.failures()[0]) if count else "")


def test_kinds_are_told_apart() -> None:
    recorder = Told()
    watch, totals = RewardWatch(cast(Any, recorder), loop_config(), lambda: 0.0), ScoringTotals()
    totals.update({"a": stats(4, 1)})
    watch.look(totals)
    assert f"({ERROR.value})" in recorder.texts[-1]
    assert recorder.texts[-1].endswith("these rollouts are left out")
    totals.update({"a": stats(8, 1, 2)})
    watch.look(totals)
    assert f"({TIMEOUT.value})" in recorder.texts[-1]
    assert recorder.texts[-1].endswith("these rollouts are left out")
    assert watch.worst is not None
    assert watch.worst.kind is TIMEOUT
    assert watch.describe().endswith("(and 1 other failure)")
