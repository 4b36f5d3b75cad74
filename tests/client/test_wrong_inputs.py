"""What a new user gets wrong, in rewards, data, models and options: `pods check` names each with its value and the fix."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pods_cluster.config import load_config
from pods_cluster.data import DataError
from pods_cluster.data.model_files import check_models
from tests.client.command import run_here
from tests.tiny_run import Made

BASE: dict[str, Any] = {
    "model": {"path": "model", "dtype": "float32"},
    "data": {"path": "rows.jsonl", "max_prompt_tokens": 16},
    "reward": [{"name": "exact_match"}],
    "generator": {"engine": "transformers", "rollouts_per_prompt": 8, "max_tokens": 6},
    "selector": {"keep": 4},
    "learner": {"prompts_per_step": 8, "tokens_per_microbatch": 2048},
    "run": {"name": "wrong", "dir": "runs"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made) -> Path:
    """A run that is right: a file of rows, a model, and a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # handlers that write to the output of an earlier test
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "400")
    shutil.copytree(made.model, tmp_path / "model")
    write_rows({"prompt": f"{row}+1=", "answer": str(row + 1)} for row in range(20))
    return tmp_path


def write_rows(rows: Any) -> None:
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def checked(capsys: pytest.CaptureFixture[str], *overrides: str, rewards: bool = False) -> tuple[int, str]:
    """Exit code of `pods check` and all that it says, without line breaks."""
    Path("run.yaml").write_text(yaml.safe_dump(BASE))
    return run_here(capsys, "check", "run.yaml", *([] if rewards else ["--no-rewards"]), *overrides)


def test_the_right_run_passes_without_notes_on_its_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys)
    assert code == 0, said
    assert said.count("note:") == 1
    assert "note: data.eval is left out" in said


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["reward.0.name=exact_mach"], ["reward.0.name: 'exact_mach'", "did you mean 'exact_match'?"]),
        (["reward.0.name=rewards.py"], ["reward.0.name: 'rewards.py'", "module:function or file.py:function"]),
        (["reward.0.weight=0"], ["reward", "weight", "0"]),
        (["reward.0.range=[1, 0]"], ["range", "[1", "0"]),
        (["reward.0.options={ignorecase: true}"], ["reward.0.options.ignorecase: True", "it takes none"]),
        (["reward=exact_match"], ["reward: 'exact_match'", "list"]),
        (["reward=[]"], ["reward: []", "at least 1"]),
        (["data.path=nowhere.jsonl"], ["data.path: 'nowhere.jsonl' does not exist", "give an existing file"]),
        (["data.prompt=question"], ["data.prompt: 'question' is not a column", "set data.prompt: prompt?"]),
        (["data.answer=label"], ["data.answer: 'label' is not a column", "set data.answer: answer?"]),
        (["data.max_prompt_tokens=2"], ["data.max_prompt_tokens: 2 is less than the shortest", "raise it"]),
        (["data.split=train[:10"], ["data.split: 'train[:10' is not a split", "as in train[:500]"]),
        (["data.split=train[30:40]"], ["'train[30:40]' takes none of its 20", "other bounds"]),
        (["data.template=Solve this"], ["data.template: 'Solve this'", "a text with {prompt}"]),
        (["data.eval={path: rows.jsonl, split: train}"], ["data.eval: rows 0 to 19", "give data.eval.path"]),
        (["model.path=/nowhere"], ["model.path: '/nowhere' does not exist", "give the folder of a model"]),
        (["model.dtype=fp16"], ["model.dtype: 'fp16'", "did you mean float16?"]),
        (["model.chat_template=no.jinja"], ["model.chat_template: 'no.jinja'", "nor a file; correct it"]),
        (
            ["model.chat_template='{% for m in messages %}x'"],
            ["the chat template refuses", "Unexpected end of template"],
        ),
        (["generator.max_tokens=2000"], ["generator.max_tokens: 2000 leaves no room", "lower it"]),
        (["generator.temperature=0"], ["generator.temperature: 0", "greater than 0"]),
        (["generator.engine=sglang"], ["generator.engine: 'sglang'", "'transformers', 'vllm' or 'paced'"]),
        (
            ["generator.engine_options={gpu_memory_utilization: 0.9}"],
            ["generator.engine_options.gpu_memory_utilization: 0.9", "it has device, kv_cache_gb, prefill_tokens"],
        ),
        (["generator.engine_options={kv_cache_gb: 2GB}"], ["kv_cache_gb: '2GB' must be a number above 0"]),
        (["selector.keep=16"], ["selector.keep: 16", "lower selector.keep"]),
        (["selector.rule=max_varience"], ["selector.rule: 'max_varience'", "did you mean 'max_variance'?"]),
        (["learner.lr=1e-5"], ["learner.lr: unknown field", "learner.learning_rate"]),
        (["learner.learning_rate=1e-6x"], ["learner.learning_rate: '1e-6x'", "a valid number"]),
        (
            ["learner.lora={rank: 4, target_modules: [q_projj]}"],
            ["learner.lora.target_modules: 'q_projj' is no layer of the model", "q_proj", "all-linear"],
        ),
        (["learner.kl={coefficient: 0.1, reference: /nowhere}"], ["learner.kl.reference: '/nowhere' does not exist"]),
        (["generators.workers=2"], ["generators", "did you mean generator?"]),
        (["run.name=a/b"], ["run.name: 'a/b' cannot name a folder", "use letters"]),
        (["run.steps=0"], ["run.steps: 0", "greater than or equal to 1"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_wrong_settings(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], texts: list[str]
) -> None:
    code, said = checked(capsys, *overrides)
    assert code != 0, said
    assert "Traceback" not in said
    for text in texts:
        assert text in said


MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("", ["data.path: 'rows.jsonl' is an empty file"]),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "b", ', ["line 2 is not valid JSON", "correct or remove it"]),
        ("prompt,answer\n1+1=,2\n", ["line 1 is not valid JSON"]),
        (b'{"prompt": "caf\xe9", "answer": "1"}', ["line 1 is not UTF-8", "correct or remove it"]),
        ([{"prompt": 3, "answer": "1"}] * 3, ["column 'prompt' of row", "holds 3", "name another column"]),
        ([{"prompt": " ", "answer": "1"}] * 3, ["row 0", "has no text in column 'prompt'", "remove the row"]),
        ([{"prompt": [{"text": "q"}], "answer": "1"}] * 3, ["not a chat message with role and content"]),
        ([{"prompt": "1+1=", "answer": None}] * 3, ["'exact_match' compares with the row's answer", "data.answer"]),
    ],
    ids=["empty", "torn", "csv", "latin-1", "numbers", "blank", "no roles", "no answers"],
)
def test_wrong_data(folder: Path, capsys: pytest.CaptureFixture[str], content: Any, texts: list[str]) -> None:
    if isinstance(content, list):
        write_rows(content)
    else:
        Path("rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, said = checked(capsys)
    assert code != 0, said
    assert "Traceback" not in said
    for text in texts:
        assert text in said


def without(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


def settings(**values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def cut_short(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def adapter_alone(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "its/base"}))


def a_part_missing(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    parts = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (without("config.json"), ["has no config.json", "give the folder of a model"]),
        (a_part_missing, ["lacks 1 of 2 files of weights (model-00002-of-00002.safetensors)", "finish the download"]),
        (cut_short, ["model.safetensors' is cut short or damaged (5,000 bytes)", "copy it again"]),
        (adapter_alone, ["holds an adapter alone", "merge it into its/base"]),
        (without("tokenizer.json", "tokenizer_config.json"), ["tokenizer", "model.path"]),
        (settings(model_type="bert", architectures=["BertForMaskedLM"]), ["no causal language model", "BertForMaskedLM"]),
        (settings(model_type="qwen99"), ["is of type 'qwen99'", "update transformers"]),
        (
            settings(model_type="own", auto_map={"AutoModelForCausalLM": "own.Own"}),
            ["is of type 'own'", "set model.trust_remote_code: true"],
        ),
        (settings(quantization_config={"quant_method": "gptq"}), ["is quantised (gptq)", "that it was made from"]),
        (settings(vocab_size=5), ["and the model knows 5", "do not belong together"]),
    ],
    ids=["no config", "part missing", "cut short", "adapter", "no tokenizer", "encoder", "unknown type",
         "code of its own", "quantised", "vocabulary"],
)  # fmt: skip
def test_wrong_models(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], texts: list[str]
) -> None:
    change(folder / "model")
    code, said = checked(capsys)
    assert code != 0, said
    assert "Traceback" not in said
    for text in ["model.path: ", *texts]:
        assert text in said


@pytest.mark.parametrize(
    ("source", "fails", "texts"),
    [
        (None, True, ["reward.0.name: 'rewards.py:score'", "no such file"]),
        ("def other(completions, **kwargs):\n    return [1.0]", True, ["reward.0.name", "score"]),
        ("def score(completions **kwargs):\n    return [1.0]", True, ["reward.0.name", "SyntaxError"]),
        ("import nothing_of_this_name\n", True, ["reward.0.name", "nothing_of_this_name"]),
        (
            "def score(completions, level, **kwargs):\n    return [1.0]",
            True,
            ["needs the column level", "add the column"],
        ),
        ("def score(completions, **kwargs):\n    return 1.0", False, ["note: reward 'score'", "expected a list"]),
        (
            "def score(completions, **kwargs):\n    return ['good']",
            False,
            ["note: reward 'score'", "expected a number"],
        ),
    ],
    ids=["absent", "no function", "syntax", "import", "column", "a number", "a text"],
)
def test_wrong_rewards(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str | None, fails: bool, texts: list[str]
) -> None:
    if source is not None:
        (folder / "rewards.py").write_text(source)
    code, said = checked(capsys, "reward.0.name=rewards.py:score", rewards=True)
    assert (code != 0) == fails, said
    assert "Traceback" not in said
    for text in texts:
        assert text in said


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "note: model.path: 'model' holds no weights (model.safetensors); finish the download"),
        (["learner.prompts_per_step=64"], "note: learner.prompts_per_step: 64 is more than the 20 rows"),
        (
            ["model.attention=flash_attention_2", "learner.packing=off"],
            "note: model.attention: flash_attention_2 needs",
        ),
    ],
)
def test_what_may_not_be_meant_is_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, overrides: list[str], text: str
) -> None:
    from pods_cluster.data import model_files

    find_spec = model_files.importlib.util.find_spec
    monkeypatch.setattr(
        model_files.importlib.util, "find_spec", lambda name: None if name == "flash_attn" else find_spec(name)
    )
    if not overrides:
        (folder / "model" / "model.safetensors").unlink()
    code, said = checked(capsys, *overrides)
    assert code == 0, said
    assert text in said
    if not overrides:
        with pytest.raises(DataError, match=r"model\.path: 'model' holds no weights"):
            check_models(load_config("run.yaml", []))
