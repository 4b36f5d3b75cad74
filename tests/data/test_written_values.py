"""Answers, messages and tools reach rewards and templates as the file's author wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import Config
from pods_cluster.data import DataError, RowError, load_prompts
from pods_cluster.data.json_faults import half_pair
from pods_cluster.data.written_values import answers_as_written, as_text, without_padding

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools|tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for t in m.tool_calls or [] %}<call>{{ t.function|tojson }}</call>{% endfor %}{% endfor %}"
)


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def answers(config: Config, tokenizer: Any, count: int) -> list[str | None]:
    return [prompt.answer for prompt in load_prompts(config, tokenizer).next(count)]


@pytest.mark.parametrize(
    "written",
    [
        ['"2024-05-10"', '"2024-05-11"'],
        ['"2024-05-17 10:00:00"', '"2024-05-18 11:30:00"'],
        ['"10:30:00"', '"11:00:00"'],
        ["2", "0.5", "3"],
        ["2.0", "1e3", "0.50"],
        ["true", "false"],
        ["null", "2", "0.5"],
        ['"2"', "2", "2.50"],
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_answers_are_the_text_of_the_file(
    written: list[str], form: str, tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [f'{{"prompt": "row {at}", "answer": {value}}}' for at, value in enumerate(written)]
    lines = rows if form == "jsonl" else ["[" + ",\n".join(rows) + "]"]
    file = write(tmp_path / f"rows.{form}", lines)
    wanted = [None if value == "null" else value.strip('"') for value in written]
    config = make_config(path=str(file), shuffle=False)
    assert answers(config, tokenizers["chatml"], len(written)) == wanted
    part = make_config(path=str(file), shuffle=False, split="train[1:]")
    assert answers(part, tokenizers["chatml"], 1) == wanted[1:2]


def test_a_number_that_no_table_holds_is_refused(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    file = write(tmp_path / "rows.json", ['[{"prompt": "a", "answer": 12345678901234567890123}]'])
    with pytest.raises(DataError, match=r"data\.path: .*write numbers beyond 64 bits as texts"):
        load_prompts(make_config(path=str(file)), tokenizers["chatml"])


def test_nested_answers_and_other_columns_keep_their_texts(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [
        {"prompt": "a", "meta": {"gold": 2, "day": "2024-05-10"}, "day": "2024-05-10"},
        {"prompt": "b", "meta": {"gold": 0.5, "day": "2024-05-11"}, "day": "2024-05-11"},
    ]
    file = write(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])
    stream = load_prompts(make_config(path=str(file), shuffle=False, answer="meta.gold"), tokenizers["chatml"])
    first = stream.next(1)[0]
    assert first.answer == "2"
    assert first.columns["day"] == "2024-05-10"
    assert first.columns["meta"]["day"] == "2024-05-10"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2"),
        (0.5, "0.5"),
        (-3.0, "-3"),
        (7, "7"),
        (True, "true"),
        (date(2024, 5, 10), "2024-05-10"),
        (datetime(2024, 5, 10, 9, 30), "2024-05-10 09:30:00"),
        ([1, 2], "[1, 2]"),
        (None, None),
        (-0.0, "0"),
        (float("nan"), None),
        (float("inf"), "Infinity"),
        (b"42", "42"),
        ("é".encode(), "é"),
        (b"\xff", "\\xff"),
        (Decimal("1.50"), "1.50"),
        (Decimal("1E+3"), "1000"),
        (Decimal("NaN"), None),
        (timedelta(days=1), "1 day, 0:00:00"),
    ],
)
def test_values_of_a_table_as_text(value: Any, text: str | None) -> None:
    assert as_text(value) == text


def test_dates_of_a_parquet_file(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": [date(2024, 5, 10), date(2024, 5, 11)]}).to_parquet(
        file
    )
    assert answers(make_config(path=str(file), shuffle=False), tokenizers["chatml"], 2) == ["2024-05-10", "2024-05-11"]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.text("ab0 ")))
def test_any_scalar_comes_back_as_it_is_written(values: list[Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        texts = [json.dumps(value) for value in values]
        path.write_text("".join(f'{{"answer": {text}}}\n' for text in texts), encoding="utf-8")
        wanted = [value if isinstance(value, str) else text for value, text in zip(values, texts, strict=True)]
        assert answers_as_written(path, ["answer"]) == wanted


def tool_row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "prompt": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "r"},
            {"role": "user", "content": "go on"},
        ],
        "answer": "1",
        "tools": [{"type": "function", "function": {"name": name, "parameters": dict.fromkeys(arguments, "any")}}],
    }


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tool_calls_without_padding_and_tools_in_the_prompt(
    form: str, tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [tool_row("weather", {"city": "Rome"}), tool_row("add", {"x": 1, "y": 2})]
    file = tmp_path / f"tools.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        write(file, [json.dumps(row) for row in rows])
    config = make_config(path=str(file), shuffle=False, model={"chat_template": TOOL_TEMPLATE})
    first, second = load_prompts(config, tokenizers["chatml"]).next(2)
    assert '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>' in first.text
    assert '"parameters": {"city": "any"}}' in first.text
    assert first.text.startswith("<tools>[")
    assert '"arguments": {"x": 1, "y": 2}' in second.text


def test_tools_as_json_text_and_tools_that_are_none(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    rows = [{"prompt": "a", "answer": "1", "tools": '[{"name": "add"}]'}, {"prompt": "b", "answer": "1", "tools": ""}]
    file = write(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])
    config = make_config(path=str(file), shuffle=False, model={"chat_template": TOOL_TEMPLATE})
    first, second = load_prompts(config, tokenizers["chatml"]).next(2)
    assert '<tools>[{"name": "add"}]</tools>' in first.text
    assert "<tools>" not in second.text


def test_tools_that_are_no_list_are_refused_by_row(
    tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    file = write(tmp_path / "rows.jsonl", ['{"prompt": "a", "answer": "1", "tools": "{broken"}'])
    config = make_config(path=str(file), shuffle=False, model={"chat_template": TOOL_TEMPLATE})
    with pytest.raises(RowError, match="column 'tools' of row 0 is no JSON"):
        load_prompts(config, tokenizers["chatml"]).next(1)


def test_padding_goes_at_any_depth() -> None:
    padded = {"a": None, "b": [{"c": 1, "d": None}], "e": {"f": {"g": None}}, "h": "text"}
    assert without_padding(padded) == {"b": [{"c": 1}], "e": {"f": {}}, "h": "text"}


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (r'{"prompt": "a\ud800b", "answer": "1"}', True),
        (r'{"prompt": "\udc00", "answer": "1"}', True),
        (r'{"prompt": "a", "answer": "\uD83D"}', True),
        (r'{"prompt": "\ud83d\ude00", "answer": "1"}', False),
        (r'{"prompt": "\\ud800", "answer": "1"}', False),
        (r'{"prompt": "ü", "answer": "1"}', False),
    ],
)
def test_half_of_a_surrogate_pair_is_named_by_line(
    line: str, bad: bool, tmp_path: Path, make_config: Callable[..., Config], tokenizers: dict[str, Any]
) -> None:
    file = write(tmp_path / "rows.jsonl", ['{"prompt": "first", "answer": "1"}', line])
    assert (half_pair(file) is not None) == bad
    config = make_config(path=str(file), shuffle=False)
    if not bad:
        assert len(load_prompts(config, tokenizers["chatml"]).next(2)) == 2
        return
    with pytest.raises(DataError, match=r"data\.path: .*line 2 holds \\u.*half of a surrogate pair.*replace"):
        load_prompts(config, tokenizers["chatml"])
