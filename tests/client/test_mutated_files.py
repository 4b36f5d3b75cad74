"""Files of data and models that are wrong in many ways: each is refused with the field and the fix, none by a traceback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.client.test_wrong_inputs import checked, folder, settings

__all__ = ["folder"]  # the fixture

ROWS: list[dict[str, Any]] = [{"prompt": f"{row}+1=", "answer": str(row + 1)} for row in range(20)]


def text_of(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def every(**values: Any) -> str:
    return text_of([{**row, **values} for row in ROWS])


def one(**values: Any) -> str:
    return text_of([{**row, **values} if place == 3 else row for place, row in enumerate(ROWS)])


GOOD = text_of(ROWS)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"
WRONG_DATA: dict[str, tuple[str | bytes, str]] = {
    "trailing comma": (GOOD + '\n{"prompt": "a",}', "line 21 is not valid JSON"),
    "a list": (GOOD + "\n[1, 2]", "line 21 holds a list"),
    "a number": ("5", "line 1 holds a int"),
    "a text": ('"abc"', "line 1 holds a str"),
    "null": (GOOD + "\nnull", "row 20"),
    "deep": ('{"prompt": "a", "answer": ' + "[" * 3000 + "]" * 3000 + "}", "nested too deeply"),
    "huge number": (GOOD + '\n{"prompt": "a", "answer": ' + "9" * 400 + "}", "write numbers beyond 64 bits as texts"),
    "NUL": (GOOD + "\n\0\0\0", "line 21 is not valid JSON"),
    "gzip": (gzip.compress(GOOD.encode()), "is not UTF-8"),
    "binary": (bytes(range(256)), "line 1 is not valid JSON"),
    "UTF-16": (GOOD.encode("utf-16"), "is not UTF-8"),
    "HTML": ("<html><body>404</body></html>", "line 1 is not valid JSON"),
    "Git LFS": (LFS, "git lfs pull"),
    "comment": ("// rows\n" + GOOD, "line 1 is not valid JSON"),
    "single quotes": ("{'prompt': 'a'}", "line 1 is not valid JSON"),
    "control character": ('{"prompt": "a\x01b", "answer": "1"}', "line 1 is not valid JSON"),
    "no columns": (text_of([{}] * 5), "holds no rows to use"),
    "empty name": ('{"": "a"}', "'prompt' is not a column"),
    "a prompt that is null": (one(prompt=None), "row 3"),
    "prompts that are null": (every(prompt=None), "row 0"),
    "a row without prompt": (text_of([*ROWS, {"answer": "1"}]), "row 20"),
    "prompts of texts": (every(prompt=["a"]), "not a chat message with role and content"),
    "prompts of one object": (every(prompt={"a": 1}), "neither a text nor a list of chat messages"),
    "prompts of nothing": (every(prompt=[]), "row 0"),
    "a role that is null": (every(prompt=[{"role": None, "content": "q"}]), "not a chat message"),
    "a user who says nothing": (every(prompt=[{"role": "user", "content": None}]), "has no text; add it"),
    "content of a number": (every(prompt=[{"role": "user", "content": 5}]), "has content 5, no text"),
    "an image": (every(prompt=[{"role": "user", "content": [{"type": "image", "url": "x"}]}]), "prompts are text only"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_data(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, told = WRONG_DATA[name]
    Path("rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, said = checked(capsys)
    assert code == 1, said
    assert "Traceback" not in said
    assert "error: data." in said
    assert told in said


@pytest.mark.parametrize("content", ["\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD.replace("\n", "\n\n")])
def test_what_only_looks_wrong_is_read(folder: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    Path("rows.jsonl").write_text(content, encoding="utf-8", newline="")
    code, said = checked(capsys)
    assert code == 0, said
    assert "20 rows" in said


def holding(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return write


def beside(name: str, **values: Any) -> Callable[[Path], None]:
    """Change values of a settings file."""

    def write(model: Path) -> None:
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return write


def sharded(model: Path, **index: Any) -> None:
    """Two files of weights and their index, with changes to it."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, model / file, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where} | index))


def an_index_that_names_more(model: Path) -> None:
    sharded(model)
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["nope.weight"] = "model-00001-of-00002.safetensors"
    (model / INDEX).write_text(json.dumps(index))


def an_index_without_metadata(model: Path) -> None:
    sharded(model)
    index = json.loads((model / INDEX).read_text())
    del index["metadata"]
    (model / INDEX).write_text(json.dumps(index))


def longer(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 8)


GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
WRONG_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty config": (holding("config.json", ""), "cannot be read"),
    "config of a list": (holding("config.json", "[]"), "holds no object"),
    "deep config": (holding("config.json", "[" * 5000), "cannot be read"),
    "type of a number": (settings(model_type=5), "model_type of 'model' is 5"),
    "type of a list": (settings(model_type=["a"]), "model_type of 'model' is ['a']"),
    "no type": (settings(model_type=None), "is of type None"),
    "vocabulary of a text": (settings(vocab_size="a"), "vocab_size in the config.json of 'model' is 'a'"),
    "no vocabulary": (settings(vocab_size=None), "vocab_size in the config.json of 'model' is None"),
    "negative width": (settings(hidden_size=-1), "hidden_size in the config.json of 'model' is -1"),
    "another width": (settings(hidden_size=48), "they do not belong together"),
    "no layers": (settings(num_hidden_layers=0), "num_hidden_layers in the config.json of 'model' is 0"),
    "more layers": (settings(num_hidden_layers=99), "its weights have"),
    "heads": (settings(num_attention_heads=3), "cannot be divided into num_attention_heads 3"),
    "empty tokenizer": (holding("tokenizer.json", ""), "tokenizer files of 'model' are damaged"),
    "torn tokenizer": (holding("tokenizer.json", '{"version": "1.0", "mod'), "tokenizer files of 'model' are damaged"),
    "tokenizer of a list": (holding("tokenizer_config.json", "[]"), "tokenizer files of 'model' are damaged"),
    "empty weights": (holding("model.safetensors", ""), "cut short or damaged (0 bytes)"),
    "weights of zeros": (holding("model.safetensors", b"\0" * 64), "cut short or damaged"),
    "weights with a huge header": (holding("model.safetensors", b"\xff" * 64), "cut short or damaged"),
    "weights by Git LFS": (holding("model.safetensors", LFS), "run git lfs pull"),
    "torn index": (holding(INDEX, "{"), "cannot be read"),
    "empty index": (holding(INDEX, "{}"), "names no files of weights beside it"),
    "index elsewhere": (
        holding(INDEX, '{"weight_map": {"a": "../../etc/passwd"}}'),
        "names no files of weights beside",
    ),
    "index of numbers": (holding(INDEX, '{"weight_map": {"a": 5}}'), "lacks 1 of 1 files of weights (5)"),
    "more tokens than weights": (settings(vocab_size=10**9), "its weights have 16 tokens: they do not belong together"),
    "no groups": (settings(num_key_value_heads=0), "num_key_value_heads in the config.json of 'model' is 0"),
    "groups": (settings(num_key_value_heads=3), "cannot be divided by num_key_value_heads 3"),
    "inner width of a text": (settings(intermediate_size="big"), "intermediate_size in the config.json of 'model' is"),
    "context of a text": (
        settings(max_position_embeddings="4k"),
        "max_position_embeddings in the config.json of 'model'",
    ),
    "no context": (settings(max_position_embeddings=0), "it must be a whole number from 1"),
    "activation of a number": (
        settings(hidden_act=5),
        "hidden_act in the config.json of 'model' is 5; it must be a text",
    ),
    "tied by a word": (settings(tie_word_embeddings="yes"), "it must be true or false"),
    "rope of a number": (
        settings(rope_scaling=5),
        "rope_scaling in the config.json of 'model' is 5; it must be an object",
    ),
    "end of a text": (settings(eos_token_id="x"), "eos_token_id in the config.json of 'model' is 'x'"),
    "text part of a number": (settings(text_config=5), "text_config in the config.json of 'model' is 5"),
    "own code of a number": (settings(auto_map=5), "auto_map in the config.json of 'model' is 5"),
    "end token of a text": (
        beside(GENERATION, eos_token_id="x"),
        "eos_token_id in the generation_config.json of 'model'",
    ),
    "end token of parts": (beside(GENERATION, eos_token_id=[1, "a"]), "a token's id or a list of ids"),
    "end token of a fraction": (beside(GENERATION, eos_token_id=1.5), "is 1.5; it must be a token's id"),
    "generation of a list": (holding(GENERATION, "[]"), "generation_config.json' holds no object"),
    "end of a number": (beside(TOKENIZER, eos_token=5), "eos_token in the tokenizer_config.json of 'model' is 5"),
    "class of a number": (beside(TOKENIZER, tokenizer_class=5), "tokenizer_class in the tokenizer_config.json"),
    "a third side": (beside(TOKENIZER, padding_side="up"), "is 'up'; it must be left or right"),
    "template of a number": (beside(TOKENIZER, chat_template=5), "chat_template in the tokenizer_config.json"),
    "weights with a tail": (longer, "cut short or damaged"),
    "index that names more": (an_index_that_names_more, "names 1 tensors that its files do not hold (nope.weight"),
    "index without metadata": (an_index_without_metadata, "has no `metadata`, which loaders read"),
    "broken template": (holding("chat_template.jinja", "{% for %}"), "the chat template refuses"),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_wrong_models(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, told = WRONG_MODELS[name]
    change(folder / "model")
    code, said = checked(capsys)
    assert code == 1, said
    assert "Traceback" not in said
    assert told in said


@pytest.mark.parametrize(
    "change",
    [
        sharded,
        settings(intermediate_size=512, head_dim=None, hidden_act="silu"),
        beside(GENERATION, eos_token_id=[1, 2]),
    ],
    ids=["two files", "nulls", "several ends"],
)
def test_models_that_only_look_wrong_pass(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(folder / "model")
    code, said = checked(capsys)
    assert code == 0, said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            weights(lambda tensors: tensors.pop("model.norm.weight")),
            "no weights for model.norm.weight .*random numbers",
        ),
        (weights(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)})), "cannot be loaded"),
        (settings(hidden_act="nonsense"), "cannot be loaded .*nonsense"),
    ],
    ids=["missing", "another shape", "activation"],
)
def test_what_shows_when_a_model_is_loaded(folder: Path, change: Callable[[Path], None], told: str) -> None:
    from pods_cluster.config import load_config
    from pods_cluster.learning.policy_model import ModelError, load_model
    from tests.client.test_wrong_inputs import BASE

    change(folder / "model")
    Path("run.json").write_text(json.dumps(BASE))
    with pytest.raises(ModelError, match=rf"model\.path: 'model' .*{told}"):
        load_model(load_config("run.json", []).model)


def test_a_model_without_an_end_token_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "'model' has no end token (eos_token_id, eos_token): every completion goes on to generator.max_tokens"
    for name, change in (("config.json", {"eos_token_id": None}), (GENERATION, {"eos_token_id": None}),
                         (TOKENIZER, {"eos_token": None})):  # fmt: skip
        assert told not in checked(capsys)[1]
        beside(name, **change)(folder / "model")
    assert told in checked(capsys)[1]
    assert told not in checked(capsys, "generator.stop_strings=[';']")[1]


def test_what_the_tokenizer_has_no_token_for_is_left_out_by_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["unk_token"] = "<absent>"
    file.write_text(json.dumps(tokenizer))
    assert checked(capsys)[0] == 0
    Path("rows.jsonl").write_text(one(prompt="☃"))
    code, said = checked(capsys)
    assert code == 0, said
    assert "1 of 20 rows cannot be rendered" in said
    assert "the tokenizer cannot read the prompt of row 3 (" in said
    Path("rows.jsonl").write_text(every(prompt="☃"))
    code, said = checked(capsys)
    assert code == 1
    assert "error: model.path: the tokenizer cannot read the prompt of row" in said
