"""`pods train` with a reward that never answers: told while one waits, and an end with its cause."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pods_cluster.client.demo import CONFIG
from pods_cluster.telemetry.run_folder import RunFolder
from tests.client.command import on_cluster, run
from tests.tiny_run import Made

REWARD = """
import subprocess, sys, time
from pathlib import Path

def judge(completions, **kwargs):
    print("asking the judge", flush=True)
    if not Path(__file__ + ".pid").exists():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        Path(__file__ + ".pid").write_text(str(child.pid))
    time.sleep(3600)
"""


@pytest.mark.slow  # waits for deadlines
def test_a_reward_that_never_answers_ends_the_run_with_its_cause(cluster: None, made: Made, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)
    settings = [f"reward=[{{name: '{file}:judge', timeout: 1.5}}]", "scoring.patience=8", "run.eval.every=0"]
    command = ["train", "--plain", str(CONFIG), *made.overrides(tmp_path), "run.name=hangs", *settings]
    result = run(*command, env=on_cluster())
    assert result.returncode == 1
    output = result.stdout + result.stderr
    assert "scoring.patience: 8" in output
    assert "reward 'judge' gave no number" in output
    folder = RunFolder.open(tmp_path / "hangs")
    events = folder.read_events()
    first = next(event for event in events if event["kind"] == "reward_failed")
    assert (first["reward"], first["failure"], first["level"]) == ("judge", "timeout", "warning")
    assert "Each takes a scorer for reward.0.timeout: 1.5 s" in first["text"]
    assert events[-1]["kind"] == "failed"
    lines = folder.rewards_log.read_text().splitlines()
    assert len(lines) >= 2
    assert all(line.endswith("generator/0 judge: asking the judge") for line in lines)
    assert not psutil.pid_exists(int(Path(f"{file}.pid").read_text())), "what the reward started outlives the run"
