"""Scorer processes and their limits: memory, what they start, what they print, what they are sent."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from pods_cluster.config import RewardConfigError, ScoringConfig
from pods_cluster.scoring import FailureKind, ScoreRequest, ScorerPool
from tests.scoring.support import reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper of a scorer is Linux's")

USER = '''
import os, subprocess, sys, time

kept = []

def eats(completions, **kwargs):
    for text in completions:
        while text == "eat":
            kept.append(bytearray(8 << 20))
    return [1.0] * len(completions)

def child_eats(completions, **kwargs):
    if completions == ["eat"]:
        code = "kept = []" + chr(10) + "while True: kept.append(bytearray(8 << 20))"
        subprocess.run([sys.executable, "-c", code])
        time.sleep(60)
    return [1.0] * len(completions)

def starts_and_eats(completions, **kwargs):
    while completions == ["eat"]:
        kept.append(bytearray(1 << 20))
        subprocess.run(["true"])
    return [1.0] * len(completions)

def shares(completions, **kwargs):
    if completions == ["eat"]:
        import mmap
        while True:
            kept.append(mmap.mmap(-1, 8 << 20))
            kept[-1].write(b"x" * (8 << 20))
    return [1.0] * len(completions)

def many(completions, **kwargs):
    """Eight forked processes that share what this one holds: no more memory than one."""
    kept.append(b"x" * (100 << 20))
    children = []
    for _ in range(8):
        if (child := os.fork()) == 0:
            time.sleep(3)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [1.0] * len(completions)

def out_of_memory(completions, **kwargs):
    return [float(len(bytearray(1 << 60))) for _ in completions]

def daemon(completions, **kwargs):
    """Starts a daemon: a child of a child, with a session of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(__file__ + ".pid", "w") as file:
                file.write(str(os.getpid()))
            os.write(write, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    found = float(os.read(read, 20))
    if completions == ["hang"]:
        time.sleep(600)
    if completions == ["die"]:
        os._exit(4)
    return [found]

def prints(completions, **kwargs):
    print("loading", end="")
    print(" done")
    print("to stderr", file=sys.stderr)
    os.write(1, b"raw" + chr(10).encode())
    subprocess.run([sys.executable, "-c", "print('by a child')"])
    return [1.0] * len(completions)

def floods(completions, **kwargs):
    for _ in range(64):
        os.write(1, (b"x" * 1023 + b"\\n") * 1024)
    return [1.0] * len(completions)

def changes(completions, tests, **kwargs):
    found = [float(len(row["cases"])) for row in tests]
    for row in tests:
        row["cases"].clear()
    return found
'''


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "user.py"
    path.write_text(USER)
    return path


def score(pool: ScorerPool, completion: str, **columns: object):
    return pool.submit(ScoreRequest("p", completion, columns=columns)).result(60)


def gone(pid: float) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(int(pid))


@pytest.mark.parametrize("name", ["eats", "child_eats", "shares", "starts_and_eats"])
def test_a_reward_that_eats_memory_is_killed_and_counted(user: Path, name: str):
    with ScorerPool([reward(f"{user}:{name}", timeout=60)], ScoringConfig(memory_limit=0.25)) as pool:
        (failure,) = score(pool, "eat").failures
        assert failure.kind is FailureKind.MEMORY
        assert "more than scoring.memory_limit: 0.25" in failure.message
        assert score(pool, "fine").total == 1.0
        assert pool.stats().failures == {name: {FailureKind.MEMORY: 1}}
        assert pool.stats().restarts == 1


def test_memory_that_forked_processes_share_is_counted_once(user: Path):
    with ScorerPool([reward(f"{user}:many", timeout=60)], ScoringConfig(memory_limit=0.4)) as pool:
        assert score(pool, "a").failures == ()


def test_a_memory_error_is_of_the_same_kind(user: Path):
    with ScorerPool([reward(f"{user}:out_of_memory")]) as pool:
        (failure,) = score(pool, "a").failures
    assert failure.kind is FailureKind.MEMORY
    assert "user.py:" in failure.message


def test_a_reward_that_eats_memory_while_it_loads_is_refused(tmp_path: Path):
    path = tmp_path / "large.py"
    path.write_text("print('reading the model')\nkept = []\nwhile True: kept.append(bytearray(8 << 20))\n")
    with pytest.raises(RewardConfigError, match=r"scoring\.memory_limit: 0\.25.*reading the model.*raise scoring\.mem"):
        ScorerPool([reward(f"{path}:f")], ScoringConfig(memory_limit=0.25))


@pytest.mark.parametrize("completion", ["hang", "die", "close"])
def test_a_daemon_that_a_reward_started_ends_with_the_scorer(user: Path, completion: str):
    with ScorerPool([reward(f"{user}:daemon", timeout=2.0)]) as pool:
        result = score(pool, completion)
        daemon = int(Path(f"{user}.pid").read_text())
        if completion == "close":
            assert result.total == daemon
            assert psutil.pid_exists(daemon)
        else:
            assert [failure.kind.value for failure in result.failures] == [
                {"hang": "timeout", "die": "died"}[completion]
            ]
            assert gone(daemon)
    assert gone(daemon)


def test_a_daemon_that_a_reward_started_ends_when_the_owner_is_killed(user: Path):
    code = textwrap.dedent(f"""
        import time
        from pods_cluster.config import RewardConfig
        from pods_cluster.scoring import ScoreRequest, ScorerPool
        pool = ScorerPool([RewardConfig(name={str(user) + ":daemon"!r})])
        print(int(pool.submit(ScoreRequest("p", "a")).result(60).total), flush=True)
        time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        daemon = int(owner.stdout.readline())
        assert psutil.pid_exists(daemon)
    finally:
        owner.kill()
        owner.communicate(timeout=10)
    assert gone(daemon)


def test_what_rewards_print_is_kept_under_their_names(user: Path):
    rewards = [reward(f"{user}:prints"), reward(f"{user}:prints", label="again")]
    with ScorerPool(rewards) as pool:
        assert score(pool, "a").total == 2.0
    printed = pool.printed()
    texts = ["loading done", "to stderr", "raw", "by a child"]
    assert [(line.reward, line.text) for line in printed.lines] == [
        (name, text) for name in ("prints", "again") for text in texts
    ]
    assert pool.printed(6).lines == printed.lines[6:]
    assert (printed.next, pool.printed(8).lines) == (8, ())


def test_a_reward_that_floods_its_output_is_not_held_up(user: Path):
    with ScorerPool([reward(f"{user}:floods", timeout=60)]) as pool:
        assert score(pool, "a").total == 1.0
    printed = pool.printed()
    assert sum(len(line.text) for line in printed.lines) <= 1 << 18
    told = [line.text for line in printed.lines if "lines left out" in line.text]
    assert told
    left_out = sum(int(text.split()[0].strip("(").replace(",", "")) for text in told)
    assert left_out + len(printed.lines) - len(told) + printed.left_out == 64 * 1024


def test_a_large_row_is_kept_once_for_all_its_rollouts(user: Path):
    path = user.with_name("large.py")
    path.write_text("def size(completions, tests, **kwargs):\n    return [float(len(text)) for text in tests]\n")
    columns = {"tests": "x" * (8 << 20)}
    with ScorerPool([reward(f"{path}:size", timeout=60)]) as pool:
        score(pool, "warm")
        me = psutil.Process()
        before, peak = me.memory_info().rss, 0
        futures = [pool.submit(ScoreRequest("p", str(index), "2", columns=columns)) for index in range(100)]
        while not all(future.done() for future in futures):
            peak = max(peak, me.memory_info().rss)
            time.sleep(0.005)
    assert all(future.result().total == float(8 << 20) for future in futures)
    assert peak - before < 100 << 20  # 8 MiB pickled, and once more in a message


def test_what_a_reward_changes_in_a_row_is_not_seen_by_the_next_rollout(user: Path):
    columns = {"tests": {"cases": [1, 2, 3]}}
    with ScorerPool([reward(f"{user}:changes")]) as pool:
        futures = [pool.submit(ScoreRequest("p", str(index), columns=columns)) for index in range(8)]
        assert [future.result(60).total for future in futures] == [3.0] * 8


def test_rows_that_do_not_fit_are_sent_again(user: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pods_cluster.scoring.rows.HELD_BYTES", 100)
    with ScorerPool([reward(f"{user}:changes")]) as pool:
        rows = [{"tests": {"cases": list(range(index))}} for index in range(40)]
        futures = [pool.submit(ScoreRequest("p", "c", columns=rows[index % 40])) for index in range(120)]
        assert [future.result(60).total for future in futures] == [float(index % 40) for index in range(120)]
