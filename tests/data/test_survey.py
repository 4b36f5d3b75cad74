"""What a run would leave out of a dataset, or not make use of, is told before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.config import Config
from pods_cluster.data.context import unsavable_settings
from pods_cluster.data.prompts import load_prompts
from pods_cluster.data.stream import PromptStream
from pods_cluster.data.survey import survey

MakeConfig = Callable[..., Config]
TOOL_TEMPLATE = "{% if tools %}<tools>{{ tools|tojson }}</tools>{% endif %}{{ messages[-1]['content'] }}"


@pytest.fixture
def stream_of(tmp_path: Path, make_config: MakeConfig, tokenizers: dict[str, Any]) -> Callable[..., PromptStream]:
    def stream(rows: list[dict[str, Any]], model: dict[str, Any] | None = None, **data: Any) -> PromptStream:
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        return load_prompts(make_config(model=model, **data), tokenizers["chatml"])

    return stream


def test_a_clean_dataset_has_no_notes(stream_of: Callable[..., PromptStream]) -> None:
    stream = stream_of([{"prompt": f"How many? {row}", "answer": str(row)} for row in range(40)])
    assert survey(stream) == ([], 40)
    assert (stream.position, stream.dropped, stream.failed) == (0, 0, 0)


def test_rows_that_cannot_be_rendered_are_counted_and_the_first_is_named(
    stream_of: Callable[..., PromptStream],
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": "q"}], "answer": "1"} for _ in range(30)]
    for row in (7, 21):
        rows[row]["prompt"] = [{"role": "critic", "content": "q"}]
    notes, _ = survey(stream_of(rows))
    assert len(notes) == 1
    assert notes[0].startswith("2 of 30 rows cannot be rendered and will be left out; the first: ")
    assert "row 7 " in notes[0]


def test_over_long_rows_are_counted_and_the_longest_is_named(stream_of: Callable[..., PromptStream]) -> None:
    rows = [{"prompt": "9 " * (100 if row in (3, 12) else 1) + "9 " * row, "answer": "1"} for row in range(20)]
    notes, _ = survey(stream_of(rows, max_prompt_tokens=90))
    assert len(notes) == 1
    assert notes[0].startswith("2 of 20 rows have more than 90 prompt tokens and will be left out")
    assert "row 12 with " in notes[0]


def test_a_survey_keeps_to_its_time_and_says_how_much_it_saw(stream_of: Callable[..., PromptStream]) -> None:
    stream = stream_of([{"prompt": "9 " * 200, "answer": "1"} for _ in range(2000)], max_prompt_tokens=90)
    seconds = count()
    notes, looked = survey(stream, 10, clock=lambda: float(next(seconds)))
    assert 5 < looked < 20
    assert f"{looked} of {looked} rows looked at (2,000 in all)" in notes[0]


@pytest.mark.parametrize(
    ("model", "chat", "text"),
    [
        ({}, True, "column 'tools': the chat template does not read it"),
        ({"chat_template": TOOL_TEMPLATE}, True, None),
        ({}, False, "column 'tools': prompts without a chat template do not read it"),
    ],
)
def test_tools_that_no_prompt_shows_are_told(
    stream_of: Callable[..., PromptStream], model: dict[str, Any], chat: bool, text: str | None
) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    rows = [{"prompt": "q", "answer": "1", "tools": tools} for _ in range(3)]
    notes, _ = survey(stream_of(rows, model, chat=chat))
    assert [note.split(", so")[0] for note in notes] == ([] if text is None else [text])


@pytest.mark.parametrize("answers", [[True, False, True], ["1", None, "3"]])
def test_answers_that_a_reward_may_stumble_over_are_told(
    stream_of: Callable[..., PromptStream], answers: list[Any]
) -> None:
    notes, _ = survey(stream_of([{"prompt": "q", "answer": answer} for answer in answers]))
    assert len(notes) == 1
    assert "'answer' (data.answer)" in notes[0]
    assert ("'true' and 'false'" in notes[0]) == (answers[0] is True)


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({}, []),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, []),
        ({"temperature": 1.0, "top_k": 50, "made_up": 3}, []),
        ({"temperature": 0.9, "top_p": 0.6}, ["temperature: 0.9, top_p: 0.6 without do_sample: true"]),
        ({"do_sample": False, "temperature": 0.0}, ["temperature: 0.0 without do_sample: true"]),
        ({"do_sample": True, "top_p": 1.5}, [r"top_p: 1.5, outside \(0, 1]"]),
    ],
)
def test_generation_settings_that_cannot_be_saved_again_are_told(
    tmp_path: Path, settings: dict[str, Any], texts: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    notes = unsavable_settings(str(tmp_path))
    assert len(notes) == len(texts)
    for note, text in zip(notes, texts, strict=True):
        assert text.replace("\\", "") in note


def test_a_template_that_reads_no_row_is_noted(stream_of: Callable[..., PromptStream]) -> None:
    rows = [{"prompt": f"How many? {row}", "answer": str(row)} for row in range(9)]
    notes, _ = survey(stream_of(rows, model={"chat_template": "{{ 'Solve it.' }}"}))
    assert notes == [
        "all rows become the same prompt, though they differ: does the chat template (model.chat_template) read them?"
    ]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(["1", "one"], "lists or objects, which rewards get as JSON"), ({"a": 1}, "name a part of it (data.answer: answer.…)"),
     ("  ", "9 of 9 rows have no answer"), (float("nan"), "9 of 9 rows have no answer")],
    ids=["list", "object", "blank", "NaN"],
)  # fmt: skip
def test_answers_that_no_reward_can_compare_with_are_noted(
    stream_of: Callable[..., PromptStream], answer: Any, text: str
) -> None:
    notes, _ = survey(stream_of([{"prompt": f"How many? {row}", "answer": answer} for row in range(9)]))
    assert len(notes) == 1
    assert text in notes[0]
