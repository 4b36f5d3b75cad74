"""The layouts that load unchanged, and what is said about those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from pods_cluster.config import Config
from pods_cluster.data import DataError, RowError, load_eval, load_prompts
from pods_cluster.data.layout import Layout, recognise

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2? Put the answer after ####."}],
    "ability": "math",
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {"index": 0, "split": "train", "answer": "2 + 2 = 4\n#### 4"},
}


@pytest.fixture
def data(make_config: Callable[..., Config]) -> Callable[..., Any]:
    return lambda **fields: make_config(**fields).data


def test_plain_columns(data: Callable[..., Any]) -> None:
    row = {"question": "2 + 2?", "answer": "4"}
    layout = recognise(list(row), row, data(prompt="question"))
    assert layout == Layout("columns", "question", ("answer",))
    assert layout.prompt_of(row, 0) == "2 + 2?"
    assert layout.answer_of(row) == "4"
    assert layout.columns_of(row) == row


@pytest.mark.parametrize("prompt", ["2 + 2?", CHAT])
def test_trl_prompt_with_columns(data: Callable[..., Any], prompt: Any) -> None:
    row = {"prompt": prompt, "solution": "4", "level": 3}
    layout = recognise(list(row), row, data(answer="solution"))
    assert layout == Layout("trl", "prompt", ("solution",))
    assert layout.prompt_of(row, 0) == prompt
    assert layout.columns_of(row) == {"solution": "4", "level": 3}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_verl_rows_load_unchanged(
    form: str, tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    dataset = datasets.Dataset.from_list(
        [VERL_ROW, VERL_ROW | {"reward_model": {"ground_truth": "5", "style": "rule"}}]
    )
    file = tmp_path / f"verl.{form}"
    dataset.to_json(file) if form == "jsonl" else dataset.to_parquet(file)
    stream = load_prompts(make_config(path=str(file), shuffle=False), tokenizers["chatml"])
    first, second = stream.next(2)
    assert (first.answer, second.answer) == ("4", "5")
    assert first.messages == tuple(VERL_ROW["prompt"])
    assert dict(first.columns) == {key: value for key, value in VERL_ROW.items() if key != "prompt"}


def test_the_answer_column_goes_before_verls(data: Callable[..., Any]) -> None:
    row = VERL_ROW | {"answer": "four"}
    assert recognise(list(row), row, data()).answer_of(row) == "four"


def test_a_path_into_a_column(data: Callable[..., Any]) -> None:
    layout = recognise(list(VERL_ROW), VERL_ROW, data(answer="extra_info.answer"))
    assert layout.kind == "verl"
    assert layout.answer_of(VERL_ROW) == "2 + 2 = 4\n#### 4"
    with pytest.raises(
        DataError, match=r"data\.answer: 'extra_info\.anser' is not in column 'extra_info', which holds"
    ):
        recognise(list(VERL_ROW), VERL_ROW, data(answer="extra_info.anser"))


def test_no_answer_at_all(data: Callable[..., Any]) -> None:
    row = {"prompt": "hi"}
    assert recognise(list(row), row, data(answer=None)).answer_of(row) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(4, "4"), (2.5, "2.5"), (True, "true"), ("4", "4"), (None, None), ([1, {"a": "é"}], '[1, {"a": "é"}]')],
)
def test_answers_become_texts(value: Any, text: str | None) -> None:
    assert Layout("trl", "prompt", ("answer",)).answer_of({"answer": value}) == text


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"question": "q", "answer": "1"},
            {},
            r"data\.prompt: 'prompt' is not a column .*\(set data\.prompt: question\?\); it has question, answer",
        ),
        ({"messages": CHAT, "ground_truth": "1"}, {}, r"data\.prompt: .*set data\.prompt: messages"),
        (
            {"messages": CHAT, "ground_truth": "1"},
            {"prompt": "messages"},
            r"data\.answer: 'answer' .*set data\.answer: ground_truth\?.*data\.answer: null if no reward reads it",
        ),
        ({"question": "q"}, {"prompt": "questoin"}, r"data\.prompt: 'questoin' .*did you mean 'question'"),
        ({"prompt": "q", "answer": "1"}, {"answer": "anwser"}, r"data\.answer: 'anwser' .*did you mean 'answer'"),
        (
            VERL_ROW,
            {"answer": "truth"},
            r"data\.answer: 'truth' .*verl's answer is data\.answer: reward_model\.ground_truth",
        ),
    ],
)
def test_missing_columns(data: Callable[..., Any], row: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognise(list(row), row, data(**fields))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"row 7 holds None, neither a text nor a list of chat messages"),
        (3, r"row 7 holds 3, neither"),
        ("  ", r"neither a text"),
        ([], r"neither a text"),
        (["hello"], r"holds 'hello', which is not a chat message with role and content"),
        ([{"content": "x"}], r"not a chat message"),
        ([{"role": "user", "content": 3}], r"has content 3, no text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], r"a part that is not text"),
    ],
)
def test_rows_without_a_prompt(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=r"data\.prompt: .*" + message):
        Layout("trl", "prompt", None).prompt_of({"prompt": value}, 7)


def test_messages_are_stripped_of_what_a_table_adds() -> None:
    layout = Layout("trl", "prompt", None)
    padded = [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    by_column = {"role": ["user"], "content": ["hi"]}
    for value in (padded, parts, by_column):
        assert layout.prompt_of({"prompt": value}, 0) == [{"role": "user", "content": "hi"}]


def test_a_blank_row_is_refused_at_load(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "2"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows[:1]).to_parquet(tmp_path / "good.parquet")
    with pytest.raises(RowError, match=r"data\.path: row 1 of .*a\.parquet' has no text in column 'prompt'"):
        load_prompts(make_config(path=str(tmp_path / "a.parquet")), tokenizers["chatml"])
    config = make_config(path=str(tmp_path / "good.parquet"), eval={"path": str(tmp_path / "a.parquet")})
    with pytest.raises(RowError, match=r"data\.eval\.path: row 1"):
        load_eval(config, tokenizers["chatml"])
