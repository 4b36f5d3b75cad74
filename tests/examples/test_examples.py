"""The examples as they are, with a tiny model and a step or two. Real Ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset

import pods_cluster
from pods_cluster.telemetry.run_folder import RunFolder
from tests.docs.pages import ROOT
from tests.tiny_run import Made

EXAMPLES = ROOT / "examples"
SMALL: dict[str, Any] = {
    "model.dtype": "float32",
    "data.max_prompt_tokens": 32,
    "generator": {"engine": "transformers", "rollouts_per_prompt": 4, "max_tokens": 6, "engine_options": {}},
    "selector": {"keep": 2, "no_signal": "keep"},
    "learner": {"zero_stage": 1, "prompts_per_step": 2, "tokens_per_microbatch": 512, "gradient_checkpointing": False},
    "run.samples_every": 0,
    "run.checkpoint.every": 0,
}


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow  # four whole runs
def test_every_example_runs(cluster: None, made: Made, tmp_path: Path) -> None:
    model, runs = str(made.model), {"run.dir": str(tmp_path), "run.eval.every": 0}
    written = ["own_reward.py", "calculator.py", "trl_script.py", "verl_data.py", "lora.yaml", "README.md"]
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_file()) == sorted(written), "one that is not run"

    own = script("own_reward")

    def broken(step: dict[str, Any]) -> None:
        raise ZeroDivisionError(f"at step {step['step']}")

    own.show = broken  # a callback that fails ends the run, saves it, and its error is raised
    plain = {"data.chat": False}
    own.ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    with pytest.raises(ZeroDivisionError, match="at step 1"):
        own.main(model, **{**SMALL, **runs, **plain, "run.steps": 1000, "run.export": False})
    folder = RunFolder.open(tmp_path / "own-reward")
    assert list(folder.checkpoints.glob("step-*/state.json"))
    assert "a callback failed (ZeroDivisionError('at step 1'))" in folder.events.read_text()

    rows = [{"prompt": f"{n}+1=", "solution": str(n + 1)} for n in range(40)]
    trl = {**SMALL, **runs, "run.name": "trl", "run.epochs": 0.1, "generator.stop_tokens": ["="]}
    result = script("trl_script").main(model, Dataset.from_list(rows), trl).result
    assert (result.status, result.steps) == ("finished", 2), "a tenth of forty rows, two a step"
    assert result.metrics.loc[1:, "rewards/accuracy_reward/mean"].between(0, 1).all()

    file = tmp_path / "train.parquet"
    Dataset.from_list(
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{n}+1="}],
                "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
                "extra_info": {"index": n},
            }
            for n in range(20)
        ]
    ).to_parquet(file)
    verl = {**SMALL, **runs, "run.steps": 1, "learner.mask_truncated": True, "model.chat_template": CHAT}
    result = script("verl_data").main(str(file), model, **verl)
    assert result.metrics.loc[1, "rewards/compute_score/mean"] == 0.0, "nothing of it is right, and nothing fails"
    assert result.metrics.loc[1, "rollouts/excluded"] == 0

    lora = {**SMALL, **runs, "run.steps": 1, "learner.lora": {"rank": 4, "alpha": 4}, "data": {"path": str(made.train),
            "name": None, "prompt": "prompt", "template": "none", "chat": False, "eval": None}}  # fmt: skip
    result = pods_cluster.train(model, config=EXAMPLES / "lora.yaml", reward="exact_match", display="off", **lora)
    assert result.status == "finished"
    assert result.model_path is not None


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
