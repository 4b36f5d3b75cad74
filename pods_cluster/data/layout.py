"""The layout of a dataset: the columns that hold the prompt and the answer.

Three layouts need no renaming: plain columns named by `data.prompt` and `data.answer`; TRL's `prompt` (a text or chat
messages) beside columns that its reward functions take by name; verl's `{prompt: [messages], reward_model:
{ground_truth, style}, data_source, extra_info}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pods_cluster.config import DataConfig
from pods_cluster.data.errors import DataError, RowError, closest
from pods_cluster.data.written_values import as_text, value_at, without_padding

PROMPT_ALIASES = ("prompt", "messages", "question", "problem", "query", "instruction", "input")
ANSWER_ALIASES = ("answer", "ground_truth", "solution", "label", "target", "final_answer")
CHOICES_ALIASES = ("choices", "options")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VERL_ANSWER = ("reward_model", "ground_truth")
TOOLS = "tools"
"""The column of tools, which a chat template may write into the prompt."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of prompt and answer; `answer` is a path of keys, None where no reward needs one. `choices` is the column of
    a multiple-choice question's choices."""

    kind: Literal["columns", "trl", "verl"]
    prompt: str
    answer: tuple[str, ...] | None
    choices: str | None = None

    def prompt_of(self, row: Mapping[str, Any], index: int) -> str | list[Message]:
        """Return the row's prompt: a text, or chat messages with text content. Raises RowError."""
        value = row.get(self.prompt)
        if isinstance(value, str) and value.strip():
            return value + self._choices_of(row, index)
        if isinstance(value, Mapping) and {"role", "content"} <= value.keys():
            # a list of messages that was stored column by column
            value = [dict(zip(value, message, strict=True)) for message in zip(*value.values(), strict=True)]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value):
            return [_message(item, self.prompt, index) for item in value]
        raise RowError(
            f"data.prompt: column {self.prompt!r} of row {index} holds {_short(value)}, "
            f"neither a text nor a list of chat messages; correct or remove the row, or name another column"
        )

    def _choices_of(self, row: Mapping[str, Any], index: int) -> str:
        """Lines `A. first choice` to stand under the question; of a row whose column is null, none. Raises RowError."""
        if self.choices is None or (value := row.get(self.choices)) is None:
            return ""
        labels: Any = None
        texts = value
        if isinstance(value, Mapping):
            texts, labels = value.get("text"), value.get("label")
        elif isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
            texts, labels = [item.get("text") for item in value], [item.get("label") for item in value]
        if isinstance(texts, Sequence) and not isinstance(texts, str) and texts:
            labels = list(LETTERS[: len(texts)]) if labels is None else labels
            if len(labels) == len(texts) and all(isinstance(item, str) and item for item in (*texts, *labels)):
                return "\n\n" + "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
        raise RowError(
            f"data.choices: column {self.choices!r} of row {index} holds {_short(value)}, neither a list of texts nor as many "
            f"`text` as `label`; correct or remove the row"
        )

    def answer_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the row's reference answer as a text (lists and objects as JSON), or None when it has none."""
        return None if self.answer is None else as_text(value_at(row, self.answer))

    def tools_of(self, row: Mapping[str, Any], index: int) -> list[Any] | None:
        """Return the row's tools for the chat template, from a column `tools` (a list, or its JSON). Raises RowError."""
        value = row.get(TOOLS)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RowError(f"column {TOOLS!r} of row {index} is no JSON ({error}); correct or remove it") from error
        if value is None or value == "" or (isinstance(value, Sequence) and not len(value)):
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise RowError(f"column {TOOLS!r} of row {index} holds {_short(value)}, no list of tools; correct the row")
        return without_padding(value)

    def columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what reward functions get by name: every column but `prompt`, which they get as `prompts`."""
        return {name: value for name, value in row.items() if name != "prompt"}


def recognise(columns: Sequence[str], first_row: Mapping[str, Any], data: DataConfig) -> Layout:
    """Recognise the layout of a dataset by its columns. Raises DataError naming data.prompt, data.answer or data.choices."""
    if data.choices is not None and data.choices not in columns:
        raise DataError(_missing("data.choices", data.choices, columns, CHOICES_ALIASES))
    return replace(_prompt_and_answer(columns, first_row, data), choices=data.choices)


def _prompt_and_answer(columns: Sequence[str], first_row: Mapping[str, Any], data: DataConfig) -> Layout:
    if data.prompt not in columns:
        raise DataError(_missing("data.prompt", data.prompt, columns, PROMPT_ALIASES))
    messages = not isinstance(first_row.get(data.prompt), str)
    reward_model = first_row.get(VERL_ANSWER[0])
    verl = messages and isinstance(reward_model, Mapping) and VERL_ANSWER[1] in reward_model
    kind = "verl" if verl else "trl" if data.prompt == "prompt" else "columns"
    if data.answer is None:
        return Layout(kind, data.prompt, None)
    if data.answer in columns:
        return Layout(kind, data.prompt, (data.answer,))
    path = tuple(data.answer.split("."))
    if len(path) > 1 and path[0] in columns:
        if _holds(first_row, path):
            return Layout(kind, data.prompt, path)
        raise DataError(
            f"data.answer: {data.answer!r} is not in column {path[0]!r}, which holds {_short(first_row.get(path[0]))}; "
            f"correct the path, or set data.answer: null if no reward reads it"
        )
    if data.answer == DataConfig.model_fields["answer"].default and _holds(first_row, VERL_ANSWER):
        return Layout(kind, data.prompt, VERL_ANSWER)
    hint = "; set data.answer: null if no reward reads it"
    if _holds(first_row, VERL_ANSWER):
        hint = "; verl's answer is data.answer: reward_model.ground_truth"
    raise DataError(_missing("data.answer", data.answer, columns, ANSWER_ALIASES) + hint)


def _missing(field: str, value: str, columns: Sequence[str], aliases: Sequence[str]) -> str:
    close = closest(value, columns)
    if not close:
        usual = [name for name in aliases if name in columns]
        close = f" (set {field}: {usual[0]}?)" if usual else ""
    return f"{field}: {value!r} is not a column of the dataset{close}; it has {', '.join(columns)}"


def _holds(row: Mapping[str, Any], path: Sequence[str]) -> bool:
    value: Any = row
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def _message(value: Any, column: str, index: int) -> Message:
    """Return a chat message without the empty fields that a table gives each row, and with its text parts joined."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RowError(
            f"data.prompt: column {column!r} of row {index} holds {_short(value)}, which is not a chat message "
            f"with role and content; correct or remove the row, or name another column"
        )
    message = without_padding(value)
    content = message.get("content", "")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(parts) < len(content):
            raise RowError(
                f"data.prompt: a message in column {column!r} of row {index} has a part that is not text; "
                f"prompts are text only: remove the row"
            )
        content = "".join(parts)
    if not isinstance(content, str):
        raise RowError(
            f"data.prompt: a message in column {column!r} of row {index} has content {_short(content)}, no text"
        )
    if message["role"] == "user" and not content.strip():
        raise RowError(
            f"data.prompt: a message of the user in column {column!r} of row {index} has no text; add it, or remove the row"
        )
    return message | {"content": content}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
