"""The prompts of a run: the stream to train on, and the held-out ones, which are never trained on."""

from __future__ import annotations

import logging
from pathlib import Path

from pods_cluster.config import Config, DataConfig, EvalDataConfig, MixedDataConfig
from pods_cluster.data.context import prompt_limit
from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.file_kinds import FORMATS
from pods_cluster.data.layout import Layout, recognise
from pods_cluster.data.mixture import load_training_rows
from pods_cluster.data.render import PromptRenderer
from pods_cluster.data.row_range import parse_split
from pods_cluster.data.source import Source, first_blank, load_source
from pods_cluster.data.stream import PromptStream
from pods_cluster.data.streamed import StreamedRows
from pods_cluster.data.tokenizer import PromptTokenizer
from pods_cluster.data.written_values import answers_as_written, holds_text
from pods_cluster.types import Prompt

_log = logging.getLogger(__name__)

ANSWER_ROWS = 100
"""Rows among which at least one has to have an answer, if a reward needs one."""


class EvalPrompts(list[Prompt]):
    """Rendered held-out prompts (epoch 0, row = index in the held-out rows). `dropped` counts those left out as over-long."""

    dropped: int = 0


def load_prompts(config: Config, tokenizer: PromptTokenizer) -> PromptStream:
    """Load the stream of training prompts of a run. Raises DataError naming the field that is wrong."""
    data = config.data
    source = load_training_rows(data, config.run.seed)
    return PromptStream(
        source.rows,
        _renderer(config, source, tokenizer, "data"),
        seed=config.run.seed,
        max_prompt_tokens=prompt_limit(config),
        shuffle=data.shuffle,
        changed=data.changed,
    )


def reward_columns(stream: PromptStream) -> set[str]:
    """Return the columns that rewards can get of a run's rows by name; `answer` where one of the first rows has one."""
    layout = stream.render.layout if isinstance(stream.render, PromptRenderer) else None
    if layout is None:
        return set(stream.rows.column_names)
    columns = set(layout.columns_of(dict.fromkeys(stream.rows.column_names)))
    first = range(min(len(stream.rows), ANSWER_ROWS))
    if any(layout.answer_of(stream.rows[index]) is not None for index in first):
        return columns | {"answer"}
    return columns - {"answer"}


def load_eval(config: Config, tokenizer: PromptTokenizer) -> EvalPrompts:
    """Load and render all held-out prompts of `data.eval`, in the dataset's order; none without `data.eval`.

    Over-long ones are left out and counted in `dropped`. Raises DataError naming the field that is wrong, also when
    rows are trained on as well, or when no held-out prompt fits.
    """
    prompts = EvalPrompts()
    if config.data.eval is None:
        return prompts
    source = load_heldout(config.data, config.data.eval)
    limit, shortest = prompt_limit(config), 0
    try:
        render = _renderer(config, source, tokenizer, "data.eval")
        rendered = [render(0, index, source.rows[index]) for index in range(len(source.rows))]
    except DataError as error:
        if str(error).startswith("data.eval"):
            raise
        raise DataError(f"data.eval: rows of {str(source)!r}, read as those that are trained on: {error}") from error
    for prompt in rendered:
        if len(prompt.token_ids) <= limit:
            prompts.append(prompt)
        else:
            prompts.dropped += 1
            shortest = min(shortest or len(prompt.token_ids), len(prompt.token_ids))
    if not prompts:
        raise DataError(
            f"data.max_prompt_tokens: {limit} is less than the shortest of the {len(source.rows)} held-out prompts, "
            f"which has {shortest} tokens; raise it, or choose other rows; "
            "where the model's context is the bound, lower generator.max_tokens or take a model with a longer one"
        )
    if prompts.dropped:
        _log.warning("%d of %d held-out prompts are longer than %d tokens", prompts.dropped, len(source.rows), limit)
    return prompts


def load_heldout(data: DataConfig, heldout: EvalDataConfig) -> Source:
    """Load the rows of `data.eval`. Raises DataError, also when some of them are trained on."""
    if heldout.path is None:
        source = load_source(data.path, heldout.name or data.name, heldout.split, heldout.rows, field="data.eval")
    else:
        source = load_source(heldout.path, heldout.name, heldout.split, heldout.rows, field="data.eval")
    for part in (data, *data.mix):
        trained = _trained_rows(part, source)
        shared = range(max(trained.start, source.span.start), min(trained.stop, source.span.stop))
        if not len(shared):
            continue
        raise DataError(
            f"data.eval: rows {shared.start} to {shared.stop - 1} of {str(source)!r} are trained on as well, so they "
            f"are not held out; give data.eval.path or another data.eval.split, or part the rows, as in "
            f"data.split: 'train[500:]' with data.eval.split: 'train[:500]'"
        )
    return source


def _trained_rows(data: DataConfig | MixedDataConfig, heldout: Source) -> range:
    """Return the rows of the held-out source's split that `data` trains on; none where it reads another split."""
    split = parse_split(data.split, "data.split")
    path, subset, name = heldout.origin
    if _resolved(data.path) != path or (subset and subset != (data.name or "")) or (name and name != split.name):
        return range(0)
    span = split.span(heldout.whole)
    return span if data.rows is None else span[: data.rows]


def _resolved(path: str) -> str:
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path


def _renderer(config: Config, source: Source, tokenizer: PromptTokenizer, field: str) -> PromptRenderer:
    layout = recognise(source.rows.column_names, source.rows[0], config.data)
    if isinstance(source.rows, StreamedRows):
        answers = None if layout.answer is None else source.rows.answers(layout.answer)
        return PromptRenderer(config, layout, tokenizer, answers)
    blank = first_blank(source.rows, layout.prompt)
    if blank is not None:
        raise RowError(
            f"{field}.path: row {blank} of {str(source)!r} has no text in column {layout.prompt!r} (data.prompt); "
            f"remove the row"
        )
    answers = _written_answers(source, layout)
    if config.environment is None:
        return PromptRenderer(config, layout, tokenizer, answers)
    from pods_cluster.environments.description import desk_of

    desk = desk_of(config)
    first_prompt = desk.first_prompt if desk.description.prompts else None
    return PromptRenderer(config, layout, tokenizer, answers, desk.description.tools, first_prompt)


def _written_answers(source: Source, layout: Layout) -> list[str | None] | None:
    """Return the answers as the file has them where it is a JSON file and Arrow holds them as something else than text."""
    path = Path(source.origin[0])
    if FORMATS.get(path.suffix.lower()) != "json" or not path.is_file() or layout.answer is None:
        return None
    if isinstance(source.rows, StreamedRows) or holds_text(source.rows.features, layout.answer):
        return None
    written = answers_as_written(path, layout.answer)
    return [written[index] for index in source.span] if len(written) == source.whole else None
