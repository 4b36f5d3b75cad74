"""Held-out prompts for evaluation, and the proof that they are held out."""

from __future__ import annotations

from pathlib import Path

from pods_cluster.config import DataConfig, EvalDataConfig
from pods_cluster.data.errors import DataError
from pods_cluster.data.row_range import parse_split
from pods_cluster.data.source import Source, load_source
from pods_cluster.types import Prompt


class EvalPrompts(list[Prompt]):
    """Rendered held-out prompts (epoch 0, row = index in the held-out rows). `dropped` counts the over-long ones."""

    dropped: int = 0


def load_heldout(data: DataConfig, heldout: EvalDataConfig) -> Source:
    """The rows of `data.eval`. Raises DataError, also when some of them are trained on."""
    if heldout.path is None:
        source = load_source(data.path, heldout.name or data.name, heldout.split, heldout.rows, field="data.eval")
    else:
        source = load_source(heldout.path, heldout.name, heldout.split, heldout.rows, field="data.eval")
    trained = _trained_rows(data, source)
    shared = range(max(trained.start, source.span.start), min(trained.stop, source.span.stop))
    if len(shared):
        raise DataError(
            f"data.eval: rows {shared.start} to {shared.stop - 1} of {str(source)!r} are trained on as well, so they "
            f"are not held out; give data.eval.path or another data.eval.split, or part the rows, as in "
            f"data.split: 'train[500:]' with data.eval.split: 'train[:500]'"
        )
    return source


def _trained_rows(data: DataConfig, heldout: Source) -> range:
    """Rows of the held-out source's whole split that `data` trains on: none when it reads another one."""
    split = parse_split(data.split, "data.split")
    place, subset, name = heldout.origin
    if _place(data.path) != place or (subset and subset != (data.name or "")) or (name and name != split.name):
        return range(0)
    span = split.span(heldout.whole)
    return span if data.rows is None else span[: data.rows]


def _place(path: str) -> str:
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path
