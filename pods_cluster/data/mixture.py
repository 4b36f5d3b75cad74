"""Several datasets as one table, in which each has its weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from pods_cluster.config import DataConfig, MixedDataConfig
from pods_cluster.data.errors import DataError
from pods_cluster.data.source import Source, load_source
from pods_cluster.data.streamed_source import stream_source

if TYPE_CHECKING:
    from datasets import Dataset

_STREAM = 0x6D69787475726500  # sets the choice of rows apart from every other use of the run's seed


def load_training_rows(data: DataConfig, seed: int) -> Source:
    """Load the rows of `data.path`, with those of `data.mix` behind them, each as often as its weight says.

    The columns of prompt and answer get the names that they have in `data`. Raises DataError naming the field.
    """
    if data.streaming:
        return stream_source(data.path, data.name, data.split, data.rows, data.shuffle_buffer)
    main = load_source(data.path, data.name, data.split, data.rows)
    if not data.mix:
        return main
    from datasets import concatenate_datasets

    parts = [_weighted(main.table, data.weight, seed, 0)]
    for index, part in enumerate(data.mix):
        field = f"data.mix.{index}"
        source = load_source(part.path, part.name, part.split, part.rows, field=field)
        rows = _renamed(source.table, part, data, field)
        parts.append(_weighted(rows, part.weight, seed, index + 1))
    try:
        whole = concatenate_datasets(parts)
    except Exception as error:
        raise DataError(
            f"data.mix: the datasets have columns of one name that hold different kinds of values ({error}); rename or convert "
            f"them, or leave them out of the files"
        ) from error
    names = " + ".join(str(part.path) for part in (data, *data.mix))
    return Source(whole, (names, "", ""), range(len(whole)), len(whole))


def repeated_rows(rows: int, weight: float, seed: int, part: int) -> Int64[np.ndarray, " served"]:
    """Indices of the rows of one dataset as an epoch has them: each floor(weight) times, and of the rest a seeded choice.

    There are round(weight x rows) of them, one at least. A pure function of the arguments, as `stream.epoch_order` is.
    """
    wanted = max(1, round(weight * rows))
    copies, rest = divmod(wanted, rows)
    order = np.argsort(
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_STREAM, part))).random_raw(rows), kind="stable"
    )
    return np.concatenate([np.tile(np.arange(rows), copies), np.sort(order[:rest])]).astype(np.int64)


def _weighted(rows: Dataset, weight: float, seed: int, part: int) -> Dataset:
    return rows if math.isclose(weight, 1.0) else rows.select(repeated_rows(len(rows), weight, seed, part))


def _renamed(rows: Dataset, part: MixedDataConfig, data: DataConfig, field: str) -> Dataset:
    for kind, own, shared in (("prompt", part.prompt, data.prompt), ("answer", part.answer, data.answer)):
        if own is None or shared is None or own == shared:
            continue
        if own not in rows.column_names:
            raise DataError(
                f"{field}.{kind}: {own!r} is not a column of {part.path!r}; it has {', '.join(rows.column_names)}"
            )
        if shared in rows.column_names:
            rows = rows.remove_columns(shared)
        rows = rows.rename_column(own, shared)
    if data.prompt not in rows.column_names:
        raise DataError(
            f"{field}.prompt: left out, and {part.path!r} has no column {data.prompt!r}; it has {', '.join(rows.column_names)}"
        )
    return rows
