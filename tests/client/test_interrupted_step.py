"""Ctrl-C in the middle of a step, after some of its groups have ended without signal: the resumed run is bitwise the
unbroken one. Separate commands."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pods_cluster.client.demo import CONFIG
from pods_cluster.run import checkpoints
from pods_cluster.telemetry.run_folder import RunFolder
from tests.client.command import on_cluster, pods, run
from tests.tiny_run import Made

REWARDS = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")

def score(completions, first, step, **kwargs):
    if first[0] in (1, 3):
        return [0.5] * len(completions)  # no signal
    if first[0] == 2 and step[0] == 2 and HOLD.exists():
        HOLD.with_name("held").touch()
        while HOLD.exists():
            time.sleep(0.01)
    return [sum(map(ord, text)) % 7 / 6 for text in completions]
"""
SETTINGS = [
    "selector.no_signal=drop",
    "generator.rollouts_per_prompt=8",
    "learner.prompts_per_step=8",
    "learner.learning_rate=1e-3",
    "learner.warmup_steps=1",
    "data.shuffle=false",
    "run.steps=3",
    "run.eval.every=0",
    "run.checkpoint.every=0",
    "data.eval=null",
]


@pytest.mark.slow  # three commands, each with processes of its own
def test_a_step_that_is_broken_off_and_made_again_is_bitwise_the_same(
    cluster: None, made: Made, tmp_path: Path
) -> None:
    firsts = [first for _ in range(10) for first in (1, 4, 2, 3, 5, 6, 7, 8)]
    rows = [
        {"prompt": f"{first}{row}+1=", "answer": "1", "first": first, "step": row // 8 + 1}
        for row, first in enumerate(firsts)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def command(name: str) -> list[str]:
        inputs = [f"data.path={tmp_path / 'rows.jsonl'}", f"reward.0.name={tmp_path / 'rewards.py'}:score"]
        overrides = [item for item in made.overrides(tmp_path) if not item.startswith("data.")]
        inputs += ["reward.0.range=[0, 1]", f"run.name={name}"]
        return ["train", "--plain", str(CONFIG), *overrides, *inputs, *SETTINGS]

    whole = run(*command("whole"), env=on_cluster())
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (tmp_path / "hold").touch()
    with subprocess.Popen(
        pods(*command("broken")), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=on_cluster()
    ) as process:
        deadline = time.monotonic() + 240
        while not (tmp_path / "held").exists() and process.poll() is None:  # the second step waits for a reward
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    (tmp_path / "hold").unlink()
    saved = checkpoints.latest(tmp_path / "broken" / "checkpoints")
    assert saved is not None, output
    state = checkpoints.read_state(saved)
    assert state.step == 1, output
    assert [row for _, row in state.stream["returned"]] == list(range(8, 16)), "some had ended, all come again"
    resumed = run(*command("broken"), "--resume", env=on_cluster())
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert weights[0] == weights[1]
    fates = [
        [record.get("groups/no_signal") for record in RunFolder.open(tmp_path / name).read_metrics()]
        for name in ("whole", "broken")
    ]
    assert fates[0] == fates[1] == [2.0, 2.0, 2.0]
