"""The example with a calculator, whole: real Ray, and a model that calls the tool. And its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pods_cluster.client.check import check
from pods_cluster.config import build_config
from pods_cluster.telemetry.run_folder import RunFolder
from tests.environments.caller import CALL, RIGHT, save_caller
from tests.examples.test_examples import EXAMPLES, SMALL, script

SETTINGS: dict[str, Any] = {
    **SMALL,
    "data.max_prompt_tokens": 1200,
    "generator": {"engine": "transformers", "rollouts_per_prompt": 16, "max_tokens": 160, "engine_options": {}},
    "selector": {"keep": 8},
    "learner": {"zero_stage": 1, "prompts_per_step": 2, "tokens_per_microbatch": 6000, "gradient_checkpointing": False,
                "learning_rate": 0.001},
    "run.steps": 3,
    "run.samples_every": 1,
    "run.export": False,
    "run.eval.every": 0,
}  # fmt: skip
ROWS = [{"question": f"Two boxes of three ({number})?", "answer": "2 * 3 = 6.\n#### 6"} for number in range(40)]


@pytest.mark.slow  # a whole run
def test_the_calculator_is_called_and_its_turns_are_trained(cluster: None, tmp_path: Path) -> None:
    model = save_caller(tmp_path / "model")
    settings = {**SETTINGS, "run.dir": str(tmp_path)}
    result = script("calculator").main(str(model), ROWS, **settings)
    assert result.status == "finished"
    steps = result.metrics.loc[1:]
    assert len(steps) == 3
    assert (steps["reward"] > 0).any()
    assert (steps["turns/mean"] > 1).any()
    assert steps["turns/limited"].dropna().between(0, 1).all()
    assert steps["tokens/environment"].sum() > 0
    assert (steps["tokens/trained"] <= steps["tokens/sampled"]).all(), "what the environment wrote is in neither"
    assert not [name for name in steps if name.startswith("scoring/failures") and steps[name].sum()]
    assert steps["sampling/sampling_logp_difference/max"].max() < 1e-3, "of the model's tokens, in their context"
    samples = RunFolder.open(tmp_path / "calculator").read_samples()
    rollouts = [rollout for sample in samples for rollout in sample["rollouts"]]
    answered = f"{CALL}<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    called = [rollout for rollout in rollouts if rollout.get("turns", 1) > 1 and rollout["finish_reason"] == "stop"]
    assert called
    assert all(rollout["text"].startswith(answered) for rollout in called)
    assert all(rollout["length"] == 2 * rollout["turns"] for rollout in called), "a tool call or an answer, and its end"
    assert {rollout["reward"] for rollout in called if rollout["text"].endswith(RIGHT)} == {1.0}
    assert np.isin([rollout["reward"] for rollout in called], [0.0, 1.0]).all()


def test_the_check_shows_the_tools_and_plays_a_turn(tmp_path: Path) -> None:
    model = save_caller(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    config = build_config(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": str(tmp_path / "rows.jsonl"), "prompt": "question", "max_prompt_tokens": 1200},
            "reward": [{"name": "math_answer"}, {"name": "environment", "none": "skip"}],
            "environment": {
                "name": "pods_cluster.environments:ToolEnvironment",
                "options": {"tools": [f"{EXAMPLES / 'calculator.py'}:calculate"]},
            },
            "generator": {"engine": "transformers", "max_tokens": 64},
            "run": {"name": "check", "steps": 1},
        }
    )
    found = check(config)
    assert found.prompt is not None
    assert '"name": "calculate"' in found.prompt.text
    assert found.played == "the rollout ends"
    assert not [note for note in found.notes if "environment" in note]
