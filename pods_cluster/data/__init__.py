"""Datasets to prompts: rows, their layout, templates, rendering, and the resumable stream. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from pods_cluster.config import Config
from pods_cluster.data.context import prompt_limit
from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.heldout import EvalPrompts, load_heldout
from pods_cluster.data.layout import Layout, recognise
from pods_cluster.data.render import PromptRenderer
from pods_cluster.data.source import FORMATS, Source, first_blank, load_source
from pods_cluster.data.stream import PromptStream
from pods_cluster.data.tokenizer import LightTokenizer, PromptTokenizer, load_tokenizer
from pods_cluster.data.written_values import answers_as_written, holds_text
from pods_cluster.types import Prompt

__all__ = [
    "DataError",
    "EvalPrompts",
    "Layout",
    "LightTokenizer",
    "PromptRenderer",
    "PromptStream",
    "PromptTokenizer",
    "RowError",
    "Source",
    "load_eval",
    "load_prompts",
    "load_source",
    "load_tokenizer",
]

_log = logging.getLogger(__name__)


def load_prompts(config: Config, tokenizer: PromptTokenizer) -> PromptStream:
    """The training prompts of a run. Raises DataError naming the field that is wrong."""
    data = config.data
    source = load_source(data.path, data.name, data.split, data.rows)
    return PromptStream(
        source.rows,
        _renderer(config, source, tokenizer, "data"),
        seed=config.run.seed,
        max_prompt_tokens=prompt_limit(config),
        shuffle=data.shuffle,
        changed=data.changed,
    )


def load_eval(config: Config, tokenizer: PromptTokenizer) -> EvalPrompts:
    """All held-out prompts of `data.eval`, rendered, in the dataset's order; empty when there is no `data.eval`.

    Over-long ones are dropped and counted in `.dropped`. Raises DataError: as above, when rows are trained on as well,
    or when no held-out prompt fits.
    """
    prompts = EvalPrompts()
    if config.data.eval is None:
        return prompts
    source = load_heldout(config.data, config.data.eval)
    render = _renderer(config, source, tokenizer, "data.eval")
    limit, shortest = prompt_limit(config), 0
    for index in range(len(source.rows)):
        prompt: Prompt = render(0, index, source.rows[index])
        if len(prompt.token_ids) <= limit:
            prompts.append(prompt)
        else:
            prompts.dropped += 1
            shortest = min(shortest or len(prompt.token_ids), len(prompt.token_ids))
    if not prompts:
        raise DataError(
            f"data.max_prompt_tokens: {limit} is less than the shortest of the {len(source.rows)} held-out prompts, "
            f"which has {shortest} tokens; raise it, or choose other rows"
        )
    if prompts.dropped:
        _log.warning("%d of %d held-out prompts are longer than %d tokens", prompts.dropped, len(source.rows), limit)
    return prompts


def _renderer(config: Config, source: Source, tokenizer: PromptTokenizer, field: str) -> PromptRenderer:
    layout = recognise(source.rows.column_names, source.rows[0], config.data)
    blank = first_blank(source.rows, layout.prompt)
    if blank is not None:
        raise RowError(
            f"{field}.path: row {blank} of {str(source)!r} has no text in column {layout.prompt!r} (data.prompt); "
            f"remove the row"
        )
    return PromptRenderer(config, layout, tokenizer, _written_answers(source, layout))


def _written_answers(source: Source, layout: Layout) -> list[str | None] | None:
    """Answers from the file itself where it is one of JSON and Arrow does not hold them as texts."""
    path = Path(source.origin[0])
    if FORMATS.get(path.suffix.lower()) != "json" or not path.is_file() or layout.answer is None:
        return None
    if holds_text(source.rows.features, layout.answer):
        return None
    written = answers_as_written(path, layout.answer)
    return [written[index] for index in source.span] if len(written) == source.whole else None
