"""The scorer pool with real processes: rewards that hang, die, raise and lie."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import as_completed, wait

import pytest

from pods_cluster.config import RewardConfigError, ScoringConfig
from pods_cluster.generation.engine import EngineStats
from pods_cluster.generation.messages import WorkerStats
from pods_cluster.generation.pool_stats import counters
from pods_cluster.scoring import (
    FailureKind,
    Score,
    ScoreRequest,
    ScorerPool,
    ScorerStartError,
    ScorerStats,
    scorer_pool,
)
from pods_cluster.scoring.scorer_process import ScorerProcess
from pods_cluster.telemetry.catalog import registry
from pods_cluster.telemetry.recorder import Recorder
from tests.scoring.support import reward

USER = '''
import math, os, signal, time

def moody(prompts, completions, **kwargs):
    """Does what the completion says."""
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "spin":
            9 ** 9 ** 9 ** 9
        if text == "exit":
            os._exit(3)
        if text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "sys.exit":
            raise SystemExit(2)
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
    special = {"none": None, "nan": math.nan, "inf": math.inf, "text": "high", "high": 5.0}
    values = [special.get(text, 1.0) for text in completions]
    return values + [1.0] if "long list" in completions else values

def number(prompts, completions, **kwargs):
    return 1.0

def pid(prompts, completions, **kwargs):
    return [float(os.getpid()) for _ in completions]

def rows_in_call(prompts, completions, **kwargs):
    moody(prompts, completions)
    return [float(len(completions))] * (len(completions) + ("long list" in completions))

def child_pid(prompts, completions, **kwargs):
    import subprocess, sys
    return [float(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid) for _ in completions]

def has_heavy(prompts, completions, **kwargs):
    import sys
    heavy = ("torch", "ray", "transformers", "numpy", "pydantic")
    return [float(any(name in sys.modules for name in heavy)) for _ in completions]

def prints(prompts, completions, **kwargs):
    print("printed by a reward")
    return [1.0 for _ in completions]
'''


@pytest.fixture
def user(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(textwrap.dedent(USER))
    return str(path)


def request(completion: str, **kwargs) -> ScoreRequest:
    return ScoreRequest("prompt", completion, **kwargs)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


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


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('broken at import')", "RuntimeError: broken at import (bad.py:1"),
        ("import no_such_package", "no_such_package"),
        ("import os; os._exit(7)", "exit code 7"),
        (
            "import time; print('reads'); time.sleep(600)",
            "within 6 s (scoring.load_timeout) (the last that was printed: reads)",
        ),
        ("f = 3", "has no function 'f'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_stops_the_start_with_its_cause(tmp_path, code, says):
    path = tmp_path / "bad.py"
    path.write_text(code)
    specs = [reward("tag_count"), reward(f"{path}:f")]
    with pytest.raises(RewardConfigError) as refused:
        ScorerPool(specs, ScoringConfig(load_timeout=6.0 if "sleep" in code else 60.0))
    assert "reward.1.name" in str(refused.value)
    assert says in str(refused.value)


def test_a_slow_import_does_not_count_as_a_call(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(3.5)\ndef f(prompts, completions): return [1.0] * len(completions)\n")
    with ScorerPool([reward(f"{path}:f", timeout=3.0)]) as pool:
        assert pool.submit(request("a")).result(30).total == 1.0


def test_a_process_that_cannot_start_again_fails_its_requests_and_says_why(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        "import os, pathlib\nmark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "if mark.exists(): raise OSError('gone')\n"
        "mark.touch()\ndef f(prompts, completions): os._exit(1)\n"
    )
    with ScorerPool([reward(f"{path}:f"), reward("tag_count")]) as pool:
        first, second = pool.submit(request("a")).result(60), pool.submit(request("b")).result(60)
    assert [failure.kind for failure in first.failures] == [FailureKind.DIED, FailureKind.START]
    assert [failure.kind for failure in second.failures] == [FailureKind.START, FailureKind.START]
    assert "OSError: gone" in second.failures[0].message


def test_a_process_lost_while_idle_costs_nobody_a_score(user):
    with ScorerPool([reward(f"{user}:pid")]) as pool:
        pid = int(pool.submit(request("a")).result(60).total or 0)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        score = pool.submit(request("b")).result(60)
        assert score.total not in (None, pid)
        assert pool.stats().restarts == 1


def test_close_answers_everything_and_leaves_no_process(user):
    pool = ScorerPool([reward(f"{user}:child_pid"), reward(f"{user}:pid"), reward(f"{user}:moody")])
    parts = pool.submit(request("a")).result(60).parts
    waiting = [pool.submit(request("hang")) for _ in range(3)]
    while pool.pending == 3:
        time.sleep(0.01)
    pool.close()
    done, left = wait(waiting, timeout=60)
    assert not left
    assert all(future.result().failures[-1].kind is FailureKind.CLOSED for future in done)
    assert gone(int(parts["pid"] or 0))
    assert gone(int(parts["child_pid"] or 0)), "what a reward started outlives the pool"
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(request("b"))
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("completion", ["idle", "spin"])
def test_a_scorer_does_not_outlive_its_parent(user, completion):
    code = textwrap.dedent(f"""
        import time
        from pods_cluster.config import RewardConfig
        from pods_cluster.scoring import ScoreRequest, ScorerPool
        names = [{user + ":pid"!r}, {user + ":moody"!r}]
        pool = ScorerPool([RewardConfig(name=name, timeout=600) for name in names])
        print(int(pool.submit(ScoreRequest("p", "a")).result(60).parts["pid"]), flush=True)
        pool.submit(ScoreRequest("p", {completion!r}))
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.kill()
        parent.wait(10)
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait(10)
        assert parent.stdout is not None
        parent.stdout.close()


def test_a_scorer_ignores_ctrl_c_and_imports_no_heavy_package(user):
    with ScorerPool([reward(f"{user}:pid", label="pid"), reward(f"{user}:has_heavy")]) as pool:
        pid = int(pool.submit(request("a")).result(60).parts["pid"] or 0)
        os.kill(pid, signal.SIGINT)
        score = pool.submit(request("b")).result(60)
        assert score.parts == {"pid": pid, "has_heavy": 0.0}
        assert pool.stats().restarts == 0


def test_what_a_reward_prints_stays_out_of_standard_output(user, capfd):
    with ScorerPool([reward(f"{user}:prints")]) as pool:
        assert pool.submit(request("a")).result(60).total == 1.0
    assert [(line.reward, line.text) for line in pool.printed().lines] == [("prints", "printed by a reward")]
    assert capfd.readouterr() == ("", "")


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


def test_works_inside_a_script_without_a_main_guard(tmp_path):
    """Scorers run a fresh interpreter; nothing of the parent's main module is run again."""
    script = tmp_path / "train.py"
    script.write_text(
        "print('once', flush=True)\nfrom pods_cluster.scoring import *\n"
        "from pods_cluster.config import RewardConfig, ScoringConfig\n"
        "with ScorerPool([RewardConfig(name='exact_match')], ScoringConfig(workers=2)) as pool:\n"
        "    print(pool.submit(ScoreRequest('p', '1', answer='1')).result(30).total)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.split() == ["once", "1.0"], done.stderr


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


def test_a_thread_without_work_looks_again_and_goes_on_waiting(user, monkeypatch):
    monkeypatch.setattr(scorer_pool, "IDLE_SECONDS", 0.01)
    with ScorerPool([reward(f"{user}:pid")], ScoringConfig(workers=2)) as pool:
        pid = pool.submit(request("a")).result(60).total
        time.sleep(0.3)
        assert pool.submit(request("b")).result(60).total is not None
        assert pid is not None
        assert pool.stats().restarts == 0


def test_a_start_that_never_ends_is_given_up_with_its_cause(monkeypatch):
    """As where the machine stands still: the process's own deadline does not come to pass."""
    stuck = threading.Event()
    monkeypatch.setattr(ScorerProcess, "start", lambda _: stuck.wait(60.0))
    monkeypatch.setattr(ScorerProcess, "close", lambda _: stuck.set())  # giving up is what ends the start
    monkeypatch.setattr(scorer_pool, "START_GRACE_SECONDS", 0.1)
    with pytest.raises(ScorerStartError, match=r"did not start within 0\.2 s"):
        ScorerPool([reward("tag_count")], ScoringConfig(load_timeout=0.1))


def worker_stats(scorers: ScorerStats) -> WorkerStats:
    """A worker that has done nothing, but for its scorers."""
    return WorkerStats(
        name="run/generator/0",
        version=0,
        closed=False,
        engine=EngineStats(),
        groups=0,
        stored=0,
        stored_tokens=0,
        scoring=0,
        reported=0,
        scorers=scorers,
        scoring_seconds_mean=0.0,
        scoring_seconds_max=0.0,
        tokens_per_second=0.0,
        saturated=0.0,
        stalled_seconds=0.0,
        occupied_seconds=0.0,
        error=None,
    )


def test_a_scorer_killed_while_it_scores_is_recorded_under_strict_metrics(user):
    """From the real process through the pool's counts to the record: nothing there is an unknown metric."""
    with ScorerPool([reward(f"{user}:pid"), reward(f"{user}:moody", label="moody/judge")]) as pool:
        pid = int(pool.submit(request("a")).result(60).parts["pid"] or 0)
        scored = pool.submit(request("hang"))
        while pool.pending:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        (failure,) = scored.result(60).failures
        assert failure.kind is FailureKind.DIED
        assert "SIGKILL" in failure.message
        assert pool.submit(request("b")).result(60).total is not None
        stats = pool.stats()
    values = counters({"run/generator/0": worker_stats(stats)})["run/generator/0"]
    with Recorder(strict=True) as recorder:
        record = recorder.step(1, values)
    assert record["scoring/failures/died/moody/judge"] == 1
    assert record["scoring/restarts"] == 1


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_its_metric(kind):
    with Recorder(strict=True) as recorder:
        assert recorder.step(1, {f"scoring/failures/{kind}/my.module:score": 2.0})
    assert registry[f"scoring/failures/{kind}/x"].choices["kind"] == tuple(FailureKind)
    assert f"scoring/failures/{kind}ed/x" not in registry
