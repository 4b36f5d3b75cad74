"""Scores of the scorer pool, with real processes: rewards that hang, die, raise and lie."""

import contextlib
import threading
import time
from concurrent.futures import as_completed

import pytest

from pods_cluster.config import ScoringConfig
from pods_cluster.scoring import (
    FailureKind,
    Score,
    ScorerPool,
)
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.recorder import Recorder
from tests.scoring.support import request, reward


def test_scores_are_weighted_sums_with_their_parts():
    specs = [reward("math_answer"), reward("tag_count", weight=0.1)]
    with ScorerPool(specs) as pool:
        texts = ["<answer>1/2</answer>", "\\boxed{3}"]
        scores = [pool.submit(request(text, answer="\\frac{2}{4}")).result(30) for text in texts]
    assert [score.parts for score in scores] == [
        {"math_answer": 1.0, "tag_count": 0.5},
        {"math_answer": 0.0, "tag_count": 0.0},
    ]
    assert [score.total for score in scores] == pytest.approx([1.05, 0.0])
    assert pool.stats().scored == 2
    assert pool.stats().missing == 0


@pytest.mark.parametrize(
    ("completion", "kind", "says"),
    [
        ("hang", FailureKind.TIMEOUT, "3 s"),
        ("spin", FailureKind.TIMEOUT, "killed"),
        ("exit", FailureKind.DIED, "exit code 3"),
        ("segfault", FailureKind.DIED, "SIGSEGV"),
        ("raise", FailureKind.ERROR, "KeyError: 'no such thing' (user.py:"),
        ("sys.exit", FailureKind.ERROR, "SystemExit"),
        ("none", FailureKind.NONE, "None"),
        ("nan", FailureKind.NAN, "NaN"),
        ("inf", FailureKind.INFINITE, "inf"),
        ("text", FailureKind.ERROR, "'high' (str)"),
        ("high", FailureKind.RANGE, "outside its range [0.0, 1.0]"),
        ("long list", FailureKind.LENGTH, "2 values for 1 completions"),
    ],
)
def test_a_reward_that_fails_is_counted_and_named_and_the_next_request_is_served(user, completion, kind, says):
    moody = reward(f"{user}:moody", range=(0.0, 1.0), timeout=3.0)
    with ScorerPool([reward("tag_count"), moody, reward("boxed_format")]) as pool:
        bad, good = pool.submit(request(completion)), pool.submit(request("\\boxed{1}"))
        score = bad.result(60)
        assert good.result(60) == Score(2.0, {"tag_count": 0.0, "moody": 1.0, "boxed_format": 1.0})
        stats = pool.stats()
    assert score.total is None
    assert score.parts == {"tag_count": 0.0, "moody": None, "boxed_format": 0.0}
    (failure,) = score.failures
    assert (failure.kind, failure.reward) == (kind, "moody")
    assert says in failure.message
    assert stats.failures == {"tag_count": {}, "moody": {kind: 1}, "boxed_format": {}}
    assert says in stats.samples["moody"][kind][0]
    assert (stats.scored, stats.missing) == (2, 1)
    assert stats.restarts == (1 if kind in (FailureKind.TIMEOUT, FailureKind.DIED) else 0)


def test_a_failing_reward_of_weight_zero_does_not_take_the_total(user):
    specs = [reward("tag_count"), reward(f"{user}:moody", weight=0.0)]
    with ScorerPool(specs) as pool:
        score = pool.submit(request("exit")).result(60)
    assert score.total == 0.0
    assert score.failures[0].kind is FailureKind.DIED


def test_none_may_mean_that_a_reward_does_not_apply(user):
    specs = [reward("boxed_format"), reward(f"{user}:moody", none="skip")]
    with ScorerPool(specs) as pool:
        none, error = pool.submit(request("none")).result(60), pool.submit(request("raise")).result(60)
    assert none == Score(0.0, {"boxed_format": 0.0, "moody": None})
    assert error.total is None
    assert pool.stats().skipped == {"boxed_format": 0, "moody": 1}


def test_a_function_that_returns_a_single_number_is_told(user):
    with ScorerPool([reward(f"{user}:number")]) as pool:
        (failure,) = pool.submit(request("a")).result(60).failures
    assert "expected a list of 1 numbers" in failure.message


def test_one_bad_rollout_does_not_cost_the_others_of_its_message(user):
    with ScorerPool([reward(f"{user}:moody", timeout=3.0)]) as pool:
        held = pool.submit(request("sleep 0.5"))  # so that the rest queue up and travel together
        texts = ["a", "exit", "b", "hang", "c", "raise", "d"]
        scores = [future.result(60) for future in [pool.submit(request(text)) for text in texts]]
        assert held.result(60).total == 1.0
    assert [score.total for score in scores] == [1.0, None, 1.0, None, 1.0, None, 1.0]
    assert [score.failures[0].kind for score in scores if score.failures] == ["died", "timeout", "error"]


@pytest.mark.parametrize("bad", ["exit", "hang", "raise", "long list"])
def test_a_batched_call_that_fails_is_made_again_row_by_row(user, bad):
    with ScorerPool([reward(f"{user}:rows_in_call", batch=4, timeout=3.0), reward("tag_count")]) as pool:
        held = pool.submit(request("sleep 1"))
        while pool.pending:
            time.sleep(0.01)
        good = [pool.submit(request("a")) for _ in range(4)]
        mixed = [pool.submit(request(text)) for text in ("a", bad, "a", "a")]
        assert held.result(60).total == 1.0
        assert [future.result(60).total for future in good] == [4.0] * 4
        assert [future.result(60).total for future in mixed] == [1.0, None, 1.0, 1.0]
    (kind,) = pool.stats().failures["rows_in_call"]
    assert kind == {"exit": "died", "hang": "timeout", "raise": "error", "long list": "length"}[bad]


def test_a_short_rollout_is_scored_before_a_long_one_of_its_batch_ends():
    """Rollouts are submitted as they finish; the short one has its score while the long one is still generated."""
    long_may_end = threading.Event()
    with ScorerPool([reward("exact_match")]) as pool:
        futures = {}

        def generate() -> None:
            futures["short"] = pool.submit(request("1", answer="1"))
            long_may_end.wait(60)
            futures["long"] = pool.submit(request("1" * 1000, answer="1"))

        batch = threading.Thread(target=generate)
        batch.start()
        while "short" not in futures:
            time.sleep(0.01)
        assert futures["short"].result(30).total == 1.0
        assert "long" not in futures
        long_may_end.set()
        batch.join(30)
        assert futures["long"].result(30).total == 0.0


def test_a_quick_score_does_not_wait_for_a_slow_one_behind_it(user):
    with ScorerPool([reward(f"{user}:moody")]) as pool:
        held = pool.submit(request("sleep 0.3"))
        quick, slow = pool.submit(request("quick")), pool.submit(request("sleep 3"))
        order = list(as_completed([held, quick, slow], timeout=60))
        assert order == [held, quick, slow]
        assert slow.result().total == 1.0


def test_a_hang_in_one_worker_leaves_the_other_working(user):
    with ScorerPool([reward(f"{user}:moody", timeout=5.0)], ScoringConfig(workers=2)) as pool:
        hang = pool.submit(request("hang"))
        while pool.pending:
            time.sleep(0.01)
        others = [pool.submit(request("a")) for _ in range(20)]
        assert all(future.result(60).total == 1.0 for future in others)
        assert not hang.done()
        assert hang.result(60).failures[0].kind is FailureKind.TIMEOUT


def test_callback_gets_the_score():
    seen, done = [], threading.Event()
    with ScorerPool([reward("exact_match")]) as pool:
        pool.submit(request("1", answer="1"), lambda future: (seen.append(future.result()), done.set()))
        assert done.wait(30)
    assert seen == [Score(1.0, {"exact_match": 1.0})]


def test_math_that_never_ends_is_killed():
    """A symbolic comparison without end costs its rollout the reward, not the run."""
    with ScorerPool([reward("math_answer", timeout=2.0)]) as pool:
        score = pool.submit(request("\\boxed{(x+1)^{5000}}", answer="\\sqrt{2}")).result(60)
        assert pool.submit(request("\\boxed{2^{1/2}}", answer="\\sqrt{2}")).result(60).total == 1.0
    assert score.total is None
    assert score.failures[0].kind is FailureKind.TIMEOUT


def test_a_column_that_cannot_be_sent_is_named():
    with ScorerPool([reward("tag_count")]) as pool:
        with pytest.raises(TypeError, match="column 'lock'"):
            pool.submit(request("a", columns={"fine": 1, "lock": threading.Lock()}))
        assert pool.submit(request("a", columns={"fine": {"deep": [1, 2]}})).result(30).total == 0.0


def test_a_cancelled_request_is_not_scored(user):
    with ScorerPool([reward(f"{user}:moody")]) as pool:
        held = pool.submit(request("sleep 0.5"))
        while pool.pending:
            time.sleep(0.01)
        dropped, kept = pool.submit(request("a")), pool.submit(request("b"))
        assert dropped.cancel()
        assert kept.result(30).total == 1.0
        assert held.result(30).total == 1.0
    assert pool.stats().scored == 2


@pytest.mark.parametrize(
    "bad",
    [{"workers": 0}, {"load_timeout": 0.0}, {"load_timeout": float("nan")}, {"memory_limit": 0.0}, {"patience": -1.0}],
)
def test_bad_settings_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        ScoringConfig(**bad)
    with pytest.raises(ValueError, match="max_batch"):
        ScorerPool([reward("tag_count")], max_batch=0)


def test_many_threads_may_submit():
    with ScorerPool([reward("exact_match")], ScoringConfig(workers=2)) as pool:
        futures = []

        def work(start: int) -> None:
            futures.extend((n, pool.submit(request(str(n), answer=str(n - n % 2)))) for n in range(start, start + 100))

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(futures) == 400
        assert all(future.result(30).total == float(n % 2 == 0) for n, future in futures)
    with contextlib.suppress(RuntimeError):
        pool.submit(request("1"))
    assert pool.stats().scored == 400


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_its_metric(kind):
    with Recorder(strict=True) as recorder:
        assert recorder.step(1, {f"scoring/failures/{kind}/my.module:score": 2.0})
    assert registry[f"scoring/failures/{kind}/x"].choices["kind"] == tuple(FailureKind)
    assert f"scoring/failures/{kind}ed/x" not in registry
