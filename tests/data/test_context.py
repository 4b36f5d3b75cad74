"""Prompts that would not fit into the model's context with their completion are over-long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import Config, parse_config
from pods_cluster.data import DataError, load_prompts
from pods_cluster.data.context import model_context, prompt_limit


def model(folder: Path, **settings: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({"max_position_embeddings": 32}, 32),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_theta": 1e4}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": None}, 32),
        ({"hidden_size": 8}, None),
        ({"max_position_embeddings": -1}, None),
    ],
)
def test_the_context_of_a_model(settings: dict[str, Any], context: int | None, tmp_path: Path) -> None:
    assert model_context(model(tmp_path / "model", **settings)) == context


@pytest.mark.parametrize("path", ["no/such-model", "/nowhere", "a b c"])
def test_a_model_that_is_not_here_has_no_known_context(path: str) -> None:
    assert model_context(path) is None


def config(path: str, prompt: int, completion: int, **generator: Any) -> Config:
    text = f"""
model: {{path: {path}}}
data: {{path: rows.jsonl, max_prompt_tokens: {prompt}}}
reward: [{{name: exact_match}}]
generator: {json.dumps({"max_tokens": completion, "rollouts_per_prompt": 4} | generator)}
selector: {{keep: 2}}
learner: {{tokens_per_microbatch: 100000}}
run: {{name: t}}
"""
    return parse_config(text)


def test_the_limit_is_what_a_completion_leaves(tmp_path: Path) -> None:
    path = model(tmp_path / "model", max_position_embeddings=32)
    assert prompt_limit(config(path, 512, 6)) == 26
    assert prompt_limit(config(path, 16, 6)) == 16
    assert prompt_limit(config(path, 512, 6, engine="vllm", engine_options={"max_model_len": 20})) == 14
    assert prompt_limit(config("no/such-model", 512, 6)) == 512
    with pytest.raises(DataError, match=r"generator\.max_tokens: 32 leaves no room .* context of 32"):
        prompt_limit(config(path, 512, 32))


def test_a_prompt_beyond_the_context_is_dropped_and_counted(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [
        {"prompt": "short", "answer": "1"},
        {"prompt": "9 " * 400, "answer": "2"},
        {"prompt": "short", "answer": "3"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    path = model(tmp_path / "model", max_position_embeddings=1100)
    stream = load_prompts(
        make_config(model={"path": path}, shuffle=False, max_prompt_tokens=1000), tokenizers["chatml"]
    )
    assert [prompt.answer for prompt in stream.next(2)] == ["1", "3"]
    assert stream.dropped == 1


def test_a_context_that_is_replaced_bounds_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    assert model_context(str(tmp_path)) == 100
    assert model_context(str(tmp_path), overrides={"max_position_embeddings": 400}) == 400
