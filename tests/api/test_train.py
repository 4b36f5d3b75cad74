"""`pods_cluster.train` with a tiny model: functions of this process as rewards, a callback that ends it. Real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import pods_cluster
from tests.client.command import environment
from tests.tiny_run import Made

SETTINGS: dict[str, Any] = {
    "model.dtype": "float32",
    "data": {"max_prompt_tokens": 16},
    "generator": {"engine": "transformers", "rollouts_per_prompt": 4, "max_tokens": 6},
    "selector": {"keep": 2, "no_signal": "keep"},
    "learner": {"zero_stage": 1, "prompts_per_step": 2, "tokens_per_microbatch": 512},
    "run": {"steps": 1000, "eval": {"every": 1000, "samples": 0}, "checkpoint": {"every": 0}, "samples_every": 0},
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_functions_of_this_process_reward_and_a_callback_ends_the_run(
    cluster: None, made: Made, tmp_path: Path
) -> None:
    here, log = os.getpid(), tmp_path / "seen"

    def even_digits(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert os.getpid() != here, "a reward runs in a process that can be killed"
        if not log.exists():  # the first completion of all hangs
            log.write_text("hangs")
            time.sleep(600)
        return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in completions]

    seen: list[dict[str, Any]] = []

    def stop_after_the_first(step: dict[str, Any]) -> None:
        seen.append(step)
        if step["step"] == 1:
            raise StopIteration

    result = pods_cluster.train(
        model=made.model,
        dataset=Dataset.from_list(rows(made.train)),
        reward=[
            {"name": even_digits, "timeout": 2.0},
            {"name": lambda completions, **_: [float(len(text)) for text in completions], "weight": 0.0},
        ],
        eval_dataset=rows(made.test)[:4],
        callbacks=stop_after_the_first,
        display="off",
        config={"run.name": "python", "run.dir": tmp_path},
        **SETTINGS,
    )
    assert (result.name, result.status) == ("python", "stopped")
    assert [step["step"] for step in seen][:2] == [0, 1]
    assert 1 <= result.steps < 1000
    assert result.checkpoint is not None
    assert result.model_path is not None
    assert (result.model_path / "model.safetensors").is_file()
    frame = result.metrics
    assert list(frame.index[:2]) == [0, 1]
    assert frame.loc[1, "scoring/failures/timeout/even_digits"] == 1
    assert frame.loc[1:, "rewards/even_digits/mean"].between(0, 1).all()
    assert (frame.loc[1:, "rewards/lambda/mean"] > 0).all()
    assert result.evaluation["eval/rows"] == 4
    assert "TrainResult(python: stopped, " in repr(result)


SCRIPT = """
import json, sys
import pods_cluster

FACTOR = 0.5

def mine(completions, **columns):
    return [FACTOR * (len(text) % 2) for text in completions]

result = pods_cluster.train(sys.argv[1], sys.argv[2], mine, display="plain", run={"dir": sys.argv[3], "name": "script",
                            "steps": 10000, "samples_every": 0}, **json.loads(sys.argv[4]))
print("ENDED", result.status, result.checkpoint is not None, result.metrics["rewards/mine/mean"].max())
"""


@pytest.mark.slow  # a Ray cluster of its own
def test_a_script_is_interrupted_and_saves(made: Made, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = {name: value for name, value in SETTINGS.items() if name != "run"}
    command = [sys.executable, str(script), str(made.model), str(made.train), str(tmp_path), json.dumps(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=tmp_path
    ) as process:
        metrics, deadline = tmp_path / "script" / "metrics.jsonl", time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and '"step": 2' in metrics.read_text().replace('"step":2', '"step": 2'):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "ENDED stopped True 0.5" in output or "ENDED stopped True 0." in output
