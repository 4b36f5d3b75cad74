"""What an environment answers, as tokens after those that the model made: as the template would write the whole talk."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pods_cluster.config import Config, build_config
from pods_cluster.data.errors import DataError
from pods_cluster.data.tokenizer import LightTokenizer
from pods_cluster.environments.turn_tokens import TurnTokens
from tests.law import law

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# as Qwen3's: what was thought is left out of turns that something follows; tools answer within a user's turn
THINKING = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
SPACED = (  # as Llama 2's: a space before the end token
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ ' ' + m.content + ' ' + eos_token }}"
    "{%- else -%}{{ '[INST] ' + m.content + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
LAST_ALONE = (  # ends a turn only where nothing follows
    "{%- for m in messages -%}{{ m.role + ': ' + m.content + ('<|im_end|>' if loop.last else '<|next|>') }}{%- endfor -%}"
)
NO_TOOLS = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('only user and assistant') }}{%- endif -%}"
    "{{ m.role + m.content + '<|im_end|>' }}{%- endfor -%}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|next|>", "</s>"]


def tokenizer_of(template: str) -> LightTokenizer:
    """A byte-level tokenizer whose only merges are those of a few words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [("a", "n"), ("o", "k"), ("s", "a"), ("Ċ", "Ċ"), ("Ġ", "a")]
    vocabulary = {text: number for number, text in enumerate([*letters, *(a + b for a, b in merged)])}
    backend = Tokenizer(models.BPE(vocabulary, merged))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return LightTokenizer(backend, {"eos_token": "</s>"}, template)


def config_of(**changes: Any) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "rows.jsonl"}, "run": {"name": "turns", "steps": 1},
                            "reward": [{"name": "exact_match"}]}  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return build_config(tree)


texts = st.text(alphabet="ano ks\n1é", max_size=12)
answers = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), texts),
    min_size=1,
    max_size=3,
)


@law(60)
@given(said=texts, answer=answers)
def test_appended_tokens_are_those_of_the_whole_talk(said: str, answer: list[dict[str, str]]) -> None:
    tokenizer = tokenizer_of(CHATML)
    encode = tokenizer.backend.encode
    turn_tokens = TurnTokens(config_of(), tokenizer)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    prompt = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True)
    made = encode(prompt + said + "<|im_end|>", add_special_tokens=False).ids
    found = [*made, *turn_tokens(made, answer)]
    whole = tokenizer.apply_chat_template([*talk, *answer], add_generation_prompt=True)
    assert found == encode(whole).ids


def test_the_past_stays_as_the_model_made_it_and_the_end_is_completed() -> None:
    tokenizer = tokenizer_of(THINKING)
    decode, encode = tokenizer.backend.decode, tokenizer.backend.encode
    turn_tokens = TurnTokens(config_of(model={"chat_template_kwargs": {"enable_thinking": False}}), tokenizer)
    turn_tokens.check("tool")
    made = encode("<think>hm</think>call<|im_end|>").ids
    tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    found = decode(turn_tokens(made, tools), skip_special_tokens=False)
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answered = (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert found == "\n" + answered + opening
    cut = encode("call").ids  # ended by a stop string or another token than the template's
    assert decode(turn_tokens(cut, tools), skip_special_tokens=False) == "<|im_end|>" + found

    spaced = tokenizer_of(SPACED)
    asked = [{"role": "user", "content": "go"}]
    found = TurnTokens(config_of(), spaced)(spaced.backend.encode(" ok</s>").ids, asked)
    assert spaced.backend.decode(found) == "[INST] go [/INST]", "the end token that the model made is not doubled"


def test_plain_prompts_go_on_with_the_text_as_it_is() -> None:
    tokenizer = tokenizer_of(CHATML)
    turn_tokens = TurnTokens(config_of(data={"chat": False}), tokenizer)
    assert tokenizer.backend.decode(turn_tokens([1], [{"role": "user", "content": "ok\n"}])) == "ok\n"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LAST_ALONE, "ends a turn of the model otherwise when messages follow"),
        (
            NO_TOOLS,
            r"refuses a conversation with the environment \(roles: user, assistant, tool\): only user and assistant",
        ),
        ("{{ messages[0].content }}", "leaves out what the model said"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused(template: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"model.chat_template: .*{problem}"):
        TurnTokens(config_of(), tokenizer_of(template)).check("tool")
