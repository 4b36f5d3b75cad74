"""Survey of a dataset before a run: rows are rendered as the run would, and what it would leave out is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pods_cluster.data.errors import RowError
from pods_cluster.data.layout import TOOLS
from pods_cluster.data.order import epoch_order
from pods_cluster.data.render import PromptRenderer
from pods_cluster.data.stream import PromptStream
from pods_cluster.data.streamed import StreamedRows
from pods_cluster.data.written_values import value_at

SECONDS = 10.0
"""Time that a survey may take."""


def survey(
    stream: PromptStream, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> tuple[list[str], int]:
    """Render the rows of `stream` for at most `seconds`, in a random order where these are too few for all.

    Returns notes for the user, and the number of rows that were looked at. The stream stays where it is.
    """
    render, rows = stream.render, stream.rows
    assert isinstance(render, PromptRenderer)
    unrenderable: dict[int, RowError] = {}
    too_long: dict[int, int] = {}
    booleans = unanswered = lists = 0
    sources: set[str] = set()
    texts: set[str] = set()
    tools_row: int | None = None
    deadline, looked = clock() + seconds, 0
    order = rows.order(stream.seed, 0) if isinstance(rows, StreamedRows) else epoch_order(stream.seed, 0, len(rows))
    for row in order.tolist():
        if looked and clock() > deadline:
            break
        looked += 1
        try:
            values = rows[row]
            prompt = render(0, row, values)
        except RowError as error:
            unrenderable[row] = error
            continue
        if len(prompt.token_ids) > stream.max_prompt_tokens:
            too_long[row] = len(prompt.token_ids)
        if len(texts) < 2:
            texts.add(prompt.text)
            sources.add(repr(values.get(render.layout.prompt)))
        if render.layout.answer is not None:
            answer = value_at(values, render.layout.answer)
            booleans += isinstance(answer, bool)
            lists += isinstance(answer, Mapping | list | tuple)
            unanswered += not (prompt.answer or "").strip()
        if tools_row is None and values.get(TOOLS):
            tools_row = row
    of = f"of {looked:,} rows" if looked == len(rows) else f"of {looked:,} rows looked at ({len(rows):,} in all)"
    notes: list[str] = []
    if unrenderable:
        first = min(unrenderable)
        notes.append(
            f"{len(unrenderable):,} {of} cannot be rendered and will be left out; the first: {unrenderable[first]}"
        )
    if too_long:
        longest = max(too_long, key=lambda row: too_long[row])
        notes.append(
            f"{len(too_long):,} {of} have more than {stream.max_prompt_tokens:,} prompt tokens and will be left out "
            f"(data.max_prompt_tokens, or less where generator.max_tokens needs the room); the longest is row {longest} "
            f"with {too_long[longest]:,}"
        )
    if tools_row is not None and not _reads_tools(render, tools_row, rows[tools_row]):
        notes.append(f"column {TOOLS!r}: {_why_unread(render)}, so the prompts say nothing of the tools")
    if len(texts) == 1 < len(sources):
        notes.append(
            "all rows become the same prompt, though they differ: does the chat template (model.chat_template) read them?"
        )
    if lists:
        field = ".".join(render.layout.answer or ())
        notes.append(
            f"column {field!r} (data.answer) holds lists or objects, which rewards get as JSON: exact_match and math_answer "
            f"compare with that text; name a part of it (data.answer: {field}.…), or read it in a reward of your own"
        )
    if booleans:
        field = ".".join(render.layout.answer or ())
        notes.append(
            f"column {field!r} (data.answer) holds booleans, which rewards get as the texts 'true' and 'false': "
            f"compare with these"
        )
    if unanswered:
        field = ".".join(render.layout.answer or ())
        notes.append(
            f"{unanswered:,} {of} have no answer in column {field!r} (data.answer); a reward that needs one fails"
        )
    return notes, looked


def _reads_tools(render: PromptRenderer, index: int, row: Mapping[str, Any]) -> bool:
    """Whether the tools of a row change its prompt."""
    return render(0, index, row).text != render(0, index, {**row, TOOLS: None}).text


def _why_unread(render: PromptRenderer) -> str:
    return "the chat template does not read it" if render.chat else "prompts without a chat template do not read it"
