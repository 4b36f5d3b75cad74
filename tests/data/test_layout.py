"""The layouts that load unchanged, and what is said about those that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from pods_cluster.config import Config, load_config
from pods_cluster.data import DataError, RowError, load_eval, load_prompts
from pods_cluster.data.layout import Layout, recognise
from pods_cluster.scoring.builtin import BUILTINS

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


@pytest.mark.parametrize(
    "choices",
    [
        ["a salt", "a base"],
        {"text": ["a salt", "a base"], "label": ["A", "B"]},
        [{"label": "A", "text": "a salt"}, {"label": "B", "text": "a base"}],
    ],
)
def test_choices_stand_under_the_question(data: Callable[..., Any], choices: Any) -> None:
    row = {"question": "What is NaCl?", "choices": choices, "answerKey": "A"}
    layout = recognise(list(row), row, data(prompt="question", answer="answerKey", choices="choices"))
    assert layout.prompt_of(row, 0) == "What is NaCl?\n\nA. a salt\nB. a base"
    assert layout.answer_of(row) == "A"
    assert layout.prompt_of(row | {"choices": None}, 0) == "What is NaCl?"  # a row of another dataset that is mixed in
    for wrong in ("A, B", [], {"text": ["one"], "label": []}, {"text": [], "label": []}, [1, 2], 5):
        with pytest.raises(
            RowError, match=r"data\.choices: column 'choices' of row 7 holds .*, neither a list of texts nor"
        ):
            layout.prompt_of(row | {"choices": wrong}, 7)
    with pytest.raises(DataError, match=r"data\.choices: 'options' is not a column .*\(set data\.choices: choices\?\)"):
        recognise(list(row), row, data(prompt="question", answer="answerKey", choices="options"))


SCIKNOWEVAL = [  # rows of the form in which it is published, with other questions; the last is of one of its open tasks
    {
        "question": "Which of these dissolves best in water?",
        "answer": "",
        "type": "mcq-4-choices",
        "domain": "Chemistry",
        "details": {
            "level": "L1",
            "task": "Chemical Literature QA",
            "subtask": "Physical Chemistry",
            "source": "Literature",
        },
        "choices": {"text": ["hexane", "sodium chloride", "sand", "graphite"], "label": ["A", "B", "C", "D"]},
        "prompt": {"default": "Given a question and four options, please select the right answer."},
        "answerKey": "B",
    },
    {
        "question": "What is the molar mass of methane?",
        "answer": "16.04 g/mol",
        "type": "open-ended-qa",
        "domain": "Chemistry",
        "details": {"level": "L3", "task": "Molar Weight Calculation", "subtask": "", "source": "PubChem"},
        "choices": {"text": [], "label": []},
        "prompt": {"default": "Please calculate."},
        "answerKey": "",
    },
]


def test_the_chemistry_setting_takes_rows_as_sciknoweval_has_them(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "chemistry.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SCIKNOWEVAL))
    path = Path(__file__).parents[2] / "configs" / "chemistry-sciknoweval-2gpu.yaml"
    config = load_config(path, [f"data.path={file}", f"data.eval.path={file}", "data.max_prompt_tokens=2000"])
    stream = load_prompts(config, tokenizers["chatml"])
    (prompt,) = stream.next(1)
    assert "the letter, and nothing else, inside <answer> and </answer>" in prompt.text
    question = "Which of these dissolves best in water?\n\nA. hexane\nB. sodium chloride\nC. sand\nD. graphite"
    assert question in prompt.text
    assert [prompt.row for prompt in stream.next(2)] == [0, 0]  # in the next epochs; the open task is left out
    assert stream.failed >= 2
    assert "data.choices: column 'choices' of row 1 holds" in str(stream.failures[-1])

    def scored(completion: str) -> dict[str, float | None]:
        found = {}
        for reward in config.reward:
            kind = BUILTINS[reward.name]
            given = {"completion": completion, "answer": prompt.answer}
            found[reward.name] = kind.function(*(given[name] for name in kind.reads), **reward.options)
        return found

    assert scored("<think>\nIons.\n</think>\n<answer>\nB\n</answer>") == {
        "choice_answer": 1.0, "think_answer_format": 1.0, "tag_count": 1.0
    }  # fmt: skip
    assert scored("<think>\nIons.\n</think>\n<answer>\n(B) sodium chloride\n</answer>")["choice_answer"] == 1.0
    assert scored("<think>\nB?\n</think>\n<answer>\nA\n</answer>")["choice_answer"] == 0.0
    assert scored("The answer is B.") == {"choice_answer": 0.0, "think_answer_format": 0.0, "tag_count": 0.0}


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
