"""The scorer pool's processes: how they start, get lost, print and end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import wait

import pytest

from pods_cluster.config import RewardConfigError, ScoringConfig
from pods_cluster.generation.engine import EngineStats
from pods_cluster.generation.messages import WorkerStats
from pods_cluster.generation.pool_stats import counters
from pods_cluster.scoring import (
    FailureKind,
    ScorerPool,
    ScorerStartError,
    ScorerStats,
    scorer_pool,
)
from pods_cluster.scoring.scorer_process import ScorerProcess
from pods_cluster.telemetry.recorder import Recorder
from tests.scoring.support import request, reward


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


@pytest.mark.parametrize("comes_back", ["pass", "raise SystemExit(0)", "raise ValueError"])
def test_a_fork_that_comes_back_answers_for_nobody(tmp_path, comes_back):
    """It would read the next requests and answer them too: other rollouts got its rewards."""
    path = tmp_path / "forks.py"
    path.write_text(
        f"""
import os
def length(completions, **kwargs):
    if os.fork() == 0:
        {comes_back}
    return [float(len(text)) for text in completions]
"""
    )
    with ScorerPool([reward(f"{path}:length", timeout=30)]) as pool:
        futures = [pool.submit(request("c" * size)) for size in range(20)]
        assert [future.result(60).total for future in futures] == [float(size) for size in range(20)]
