"""Rendering through real tokenizers: one start token, chat and plain text, and the same without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pods_cluster.config import Config, ModelConfig
from pods_cluster.data import DataError, LightTokenizer, PromptRenderer, RowError, load_tokenizer
from pods_cluster.data.layout import Layout
from pods_cluster.types import Prompt

LAYOUT = Layout("trl", "prompt", None)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many clips?"}]


def render(config: Config, tokenizer: Any, prompt: Any) -> Prompt:
    return PromptRenderer(config, LAYOUT, tokenizer)(0, 0, {"prompt": prompt})


@pytest.mark.parametrize("name", ["header", "chatml"])
@pytest.mark.parametrize("prompt", ["How many clips?", CHAT])
def test_a_chat_has_the_ids_of_the_tokenizers_own_rendering(
    name: str, prompt: Any, tokenizers: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    got = render(make_config(), tokenizers[name], prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    expected = tokenizers[name].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(got.token_ids) == expected
    assert tokenizers[name].decode(got.token_ids) == got.text
    # rewards see a conversation only where the dataset has one
    assert list(got.messages) == ([] if isinstance(prompt, str) else prompt)


THINKING = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
)


def test_variables_reach_the_chat_template(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    for kwargs, text in (({}, "How many clips?"), ({"enable_thinking": False}, "How many clips?!")):
        config = make_config()
        model = config.model.model_copy(update={"chat_template": THINKING, "chat_template_kwargs": kwargs})
        config = config.model_copy(update={"model": model})
        assert render(config, tokenizers["chatml"], "How many clips?").text == text
        light = LightTokenizer.from_folder(Path(tokenizers["chatml"].name_or_path))
        assert render(config, light, "How many clips?").text == text


def test_exactly_one_start_token(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    tokenizer = tokenizers["header"]
    for config in (make_config(), make_config(chat=False)):
        ids = render(config, tokenizer, "How many clips?").token_ids
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_a_plain_text_that_brings_its_start_token_keeps_one(
    tokenizers: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    bare = render(make_config(chat=False), tokenizers["header"], "How many clips?")
    with_start = render(make_config(chat=False), tokenizers["header"], "<|begin|>How many clips?")
    assert bare.token_ids == with_start.token_ids


def test_a_chat_template_that_doubles_the_start_token_is_refused(
    tokenizers: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    config = make_config({"chat_template": "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"})
    with pytest.raises(RowError, match=r"model\.chat_template: the prompt of row 0 starts with two start tokens"):
        render(config, tokenizers["header"], "hi")


def test_plain_text(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    tokenizer = tokenizers["base"]
    got = render(make_config(chat=False, system="Be brief.", template="boxed"), tokenizer, "How many clips?")
    assert got.text.startswith("Be brief.\n\nHow many clips?\n\n")
    assert list(got.token_ids) == tokenizer(got.text)["input_ids"]
    assert render(make_config(chat=False), tokenizer, CHAT).text == "Be brief.\n\nHow many clips?"
    with pytest.raises(
        RowError, match=r"data\.chat: false, but the prompt of row 0 is a conversation \(roles: user, assis"
    ):
        render(make_config(chat=False), tokenizer, [CHAT[1], {"role": "assistant", "content": "x"}])


def test_no_chat_template(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    with pytest.raises(
        DataError, match=r"data\.chat: true, but .*'some/model' has no chat template; set data\.chat: false"
    ):
        PromptRenderer(make_config(), LAYOUT, tokenizers["base"])


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_of_ones_own(
    as_file: bool, tmp_path: Path, tokenizers: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (tmp_path / "chat.jinja").write_text(template)
    config = make_config({"chat_template": str(tmp_path / "chat.jinja") if as_file else template})
    assert render(config, tokenizers["base"], "hi").text == "[user] hi\n[assistant]"


def test_a_chat_template_that_is_nowhere(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    with pytest.raises(DataError, match=r"model\.chat_template: 'gone\.jinja' is neither"):
        PromptRenderer(make_config({"chat_template": "gone.jinja"}), LAYOUT, tokenizers["base"])


def test_system_message_and_template(tokenizers: dict[str, Any], make_config: Callable[..., Config]) -> None:
    config = make_config(system="You add.", template="Q: {prompt}")
    text = render(config, tokenizers["chatml"], "2 + 2?").text
    assert (
        text == "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nQ: 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    # a row's own system message stays; the template goes around its last user message
    got = render(config, tokenizers["chatml"], CHAT)
    assert got.messages == (CHAT[0], {"role": "user", "content": "Q: How many clips?"})
    assert CHAT[1]["content"] == "How many clips?", "the row itself is not changed"
    bare = render(config, tokenizers["chatml"], CHAT[1:])
    assert bare.messages[0] == {"role": "system", "content": "You add."}


def test_a_conversation_that_ends_with_the_assistant_is_continued(
    tokenizers: dict[str, Any], tokenizer_folders: dict[str, Path], make_config: Callable[..., Config]
) -> None:
    chat = [CHAT[1], {"role": "assistant", "content": "<think>"}]
    for tokenizer in (tokenizers["header"], LightTokenizer.from_folder(tokenizer_folders["header"])):
        assert render(make_config(), tokenizer, chat).text.endswith("<|head|>assistant<|tail|><think>")


def test_a_refusal_of_the_chat_template_names_the_row(
    tokenizers: dict[str, Any], tokenizer_folders: dict[str, Path], make_config: Callable[..., Config]
) -> None:
    for tokenizer in (tokenizers["chatml"], LightTokenizer.from_folder(tokenizer_folders["chatml"])):
        with pytest.raises(RowError, match=r"data\.chat: .*row 0 \(roles: critic\): unknown role \"critic\""):
            render(make_config(), tokenizer, [{"role": "critic", "content": "hm"}])


@pytest.mark.parametrize("name", ["header", "chatml", "base", "quickstart"])
def test_the_light_tokenizer_equals_the_real_one(
    name: str, tokenizer_folders: dict[str, Path], tmp_path: Path, make_config: Callable[..., Config]
) -> None:
    if name == "quickstart":
        from pods_cluster.quickstart.character_tokenizer import build_tokenizer

        build_tokenizer().save_pretrained(tmp_path)
    folder = tmp_path if name == "quickstart" else tokenizer_folders[name]
    light, real = load_tokenizer(ModelConfig(path=str(folder)), light=True), AutoTokenizer.from_pretrained(folder)
    assert isinstance(light, LightTokenizer)
    assert light.bos_token_id == real.bos_token_id
    assert light.chat_template == real.chat_template
    for prompt in ("47+38=", "  Ünïcode <|im_end|>\n\ttabs <b>&</b>", CHAT):
        for chat in (True, False):
            if chat and real.chat_template is None:
                continue
            config = make_config(chat=chat, template="boxed")
            assert render(config, light, prompt) == render(config, real, prompt)


def test_load_tokenizer(tokenizer_folders: dict[str, Path], tmp_path: Path) -> None:
    real = load_tokenizer(ModelConfig(path=str(tokenizer_folders["chatml"]), chat_template="{{ messages }}"))
    assert real.chat_template == "{{ messages }}"
    for light in (True, False):
        with pytest.raises(DataError, match=r"model\.path: .*nothing.* (cannot be loaded|damaged|could not be had)"):
            load_tokenizer(ModelConfig(path=str(tmp_path / "nothing")), light=light)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"model\.path: the tokenizer files of .* are damaged"):
        load_tokenizer(ModelConfig(path=str(tmp_path)), light=True)


def test_a_prompt_is_rendered_without_torch_or_transformers(tokenizer_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "How many clips?", "answer": "72"}) + "\n")
    script = f"""
import sys
from pods_cluster.config import build_config
from pods_cluster.data import load_prompts, load_tokenizer
config = build_config({{
    "model": {{"path": {str(tokenizer_folders["header"])!r}}}, "data": {{"path": {str(tmp_path / "rows.jsonl")!r}}},
    "reward": [{{"name": "math_answer"}}], "run": {{"name": "light"}},
}})
prompt, = load_prompts(config, load_tokenizer(config.model, light=True)).next(1)
assert prompt.text == "<|begin|><|head|>user<|tail|>How many clips?<|eot|><|head|>assistant<|tail|>", prompt.text
heavy = {{"torch", "ray", "vllm", "transformers", "deepspeed"}} & set(sys.modules)
assert not heavy, heavy
"""
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_of_a_text_of_megabytes_only_the_beginning_is_tokenised(
    tokenizers: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    config, tokenizer = make_config(chat=False, max_prompt_tokens=20), tokenizers["base"]
    assert 20 < len(render(config, tokenizer, "9 " * 1_000_000).token_ids) < 20_000
    some = render(config, tokenizer, "How many clips? " * 20)  # too long, and tokenised whole
    assert list(some.token_ids) == tokenizer(some.text)["input_ids"]
