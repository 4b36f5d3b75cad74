"""The examples as they are, with a tiny model and a few steps. Real Ray, one cluster.

The sweep is run by tests/client/test_sweep.py, the calculator by tests/environments.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

import pods_cluster
from pods_cluster.client.cli import app
from pods_cluster.quickstart.character_tokenizer import build_tokenizer
from pods_cluster.quickstart.tiny_model import ModelSize, build_model
from pods_cluster.telemetry.run_folder import RunFolder
from tests.docs.pages import ROOT
from tests.tiny_run import Made

EXAMPLES = ROOT / "examples"
WRITTEN = ["README.md", "calculator.py", "lora.yaml", "own_reward.py", "sweep.yaml", "trl_script.py", "verl_data.py"]
SMALL: dict[str, Any] = {
    "model.dtype": "float32",
    "data.max_prompt_tokens": 32,
    "generator": {"engine": "transformers", "rollouts_per_prompt": 4, "max_tokens": 6, "engine_options": {}},
    "selector": {"keep": 2, "no_signal": "keep"},
    "learner": {"zero_stage": 1, "prompts_per_step": 2, "tokens_per_microbatch": 512, "gradient_checkpointing": False},
    "run.samples_every": 0,
    "run.checkpoint.every": 0,
    "run.eval.every": 0,
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

TRL_QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
"""docs/source/grpo_trainer.md of TRL, version 1.16."""


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_file()) == WRITTEN, "one that is not run"


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow  # a whole run
def test_a_reward_of_ones_own_and_a_callback_that_fails(cluster: None, made: Made, tmp_path: Path) -> None:
    own = script("own_reward")

    def broken(step: dict[str, Any]) -> None:
        raise ZeroDivisionError(f"at step {step['step']}")

    own.show = broken  # a callback that fails ends the run, saves it, and its error is raised
    own.ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    settings = {**SMALL, "data.chat": False, "run.dir": str(tmp_path), "run.steps": 1000, "run.export": False}
    with pytest.raises(ZeroDivisionError, match="at step 1"):
        own.main(str(made.model), **settings)
    folder = RunFolder.open(tmp_path / "own-reward")
    assert list(folder.checkpoints.glob("step-*/state.json"))
    assert "a callback failed (ZeroDivisionError('at step 1'))" in folder.events.read_text()


def test_trls_quick_start_has_one_changed_import() -> None:
    ours = (EXAMPLES / "trl_script.py").read_text().split('"""\n', 2)[1].split("  # was")[0].splitlines()
    ours += (EXAMPLES / "trl_script.py").read_text().split("GRPOTrainer\n", 1)[1].splitlines()
    changed = sorted(set(TRL_QUICK_START.split("\n")) ^ set(ours))
    assert changed == ["from pods_cluster.trl import GRPOTrainer", "from trl import GRPOTrainer"]


@pytest.mark.slow  # a whole run
def test_trls_quick_start_runs_word_for_word(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its model and of its dataset lead to folders here: a tiny model and one row in the dataset's form."""
    pytest.importorskip("trl", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    folder, tokenizer = tmp_path / "Qwen" / "Qwen2-0.5B-Instruct", build_tokenizer()
    size = ModelSize(hidden=64, layers=1, heads=1, mlp=64, context=1024)  # ends after some sixteen of its 512 tokens
    build_model(size, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "solution": "$2$"}
    Path("trl-lib", "DeepMath-103K").mkdir(parents=True)
    Dataset.from_list([row]).to_parquet("trl-lib/DeepMath-103K/train.parquet")

    result = runpy.run_path(str(EXAMPLES / "trl_script.py"))["trainer"].result
    assert (result.status, result.steps) == ("finished", 3), "three epochs"
    assert (result.metrics.loc[1:, "rollouts/generated"] == 8).all()
    assert result.metrics.loc[1:, "rewards/accuracy_reward/mean"].between(0, 1).all()
    assert result.model_path == tmp_path / "runs" / "Qwen2-0.5B-Instruct-GRPO" / "model"


@pytest.mark.slow  # a whole run
def test_verls_command_trains_with_its_parquet_and_a_reward_of_its_form(
    cluster: None, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(20)
    ]
    for split in ("train", "test"):
        Dataset.from_list(rows).to_parquet(f"data/gsm8k/{split}.parquet")
    text = (EXAMPLES / "verl_data.py").read_text().split("pods import verl --train -- ")[1].split("\n\n")[0]
    words = text.replace("\\\n", " ").replace("$HOME", str(tmp_path)).replace("examples/", f"{EXAMPLES}/").split()
    fields = {
        **SMALL,
        "run.epochs": 0.1,
        "learner.mask_truncated": True,
        "model.path": made.model,
        "model.chat_template": CHAT,
    }
    fields |= {
        "generator.gpus_per_worker": 0,
        "learner.gpus_per_worker": 0,
        "learner.updates_per_batch": 1,
        "run.export": False,
    }
    settings = [part for name, value in flat(fields).items() for part in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(app, ["import", "verl", "--train", *settings, "--", *words])
    assert done.exit_code == 0, done.output
    assert "did not carry over" not in done.output
    steps = [
        record for record in RunFolder.open(tmp_path / "runs/verl_examples/gsm8k").read_metrics() if record["step"]
    ]
    assert len(steps) == 1, "a tenth of twenty rows, two a step"
    assert steps[0]["rewards/compute_score/mean"] == 0.0, "nothing of it is right, and nothing fails"
    assert steps[0]["rollouts/excluded"] == 0


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as `key=value` takes them."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            found |= flat({f"{name}.{inner}": each for inner, each in value.items()})
        else:
            found[name] = json.dumps(value, default=str)  # which is YAML too
    return found


@pytest.mark.slow  # a whole run
def test_adapters(cluster: None, made: Made, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {**SMALL, "run.dir": str(tmp_path), "run.steps": 1, "learner.lora": {"rank": 4, "alpha": 4},
                "generator.stop_strings": ["="], "data": {"path": str(made.train), "name": None, "prompt": "prompt",
                "template": "none", "chat": False, "eval": None}}  # fmt: skip
    settings["generator"] = {**SMALL["generator"], "stop_tokens": ["+"]}
    result = pods_cluster.train(
        str(made.model), config=EXAMPLES / "lora.yaml", reward="exact_match", display="off", **settings
    )
    assert result.status == "finished"
    assert result.model_path is not None
