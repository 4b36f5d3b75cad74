"""Rows that Python holds (a `datasets.Dataset`, a list of dicts, a data frame) → a file or folder that a run reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pods_cluster.config import ConfigError
from pods_cluster.data.source import quiet

FOLDER = ".inputs"
"""Beside the runs, in `run.dir`: the rows that runs were given, by the name of the run and a digest of the rows."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows that are no file yet: their columns, the first row, and how they are written."""

    table: Any
    columns: tuple[str, ...]
    first: Mapping[str, Any]
    count: int
    split: str | None = None

    def __len__(self) -> int:
        return self.count

    def write(self, folder: Path, name: str) -> Path:
        """Write the rows into `folder` as `name` and a digest; rows that lie there already are left as they are."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir: the dataset's rows cannot be written to {folder} ({error.strerror or error}); set run.dir to a "
                f"place that can be written"
            ) from error
        if isinstance(self.table, str):
            path = folder / f"{name}-{hashlib.sha256(self.table.encode()).hexdigest()[:12]}.jsonl"
            _once(path, lambda place: place.write_text(self.table, encoding="utf-8"))
            return path
        path = folder / f"{name}-{_digest(self.table)}"
        with quiet():
            _once(path, lambda place: self.table.save_to_disk(str(place)))
        return path


def held_rows(dataset: Any, field: str) -> HeldRows | None:
    """Return the rows of an object; None where it names a file, a folder or a hub dataset. Raises ConfigError.

    `field` is how errors call it: the argument of the caller.
    """
    if isinstance(dataset, str | os.PathLike):
        return None
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(dataset, IterableDataset | IterableDatasetDict):
        raise ConfigError(
            f"{field}: a streaming dataset has no rows by number, which resuming needs; give its path or name with "
            f"data.streaming: true, load it without streaming=True, or take a part: Dataset.from_list(list(stream.take(10_000)))"
        )
    if isinstance(dataset, DatasetDict):
        split = "train" if "train" in dataset else next(iter(dataset), None)
        if split is None:
            raise ConfigError(f"{field}: this DatasetDict has no split; give a Dataset with rows")
        return _of_table(dataset[split], dataset, field, str(split))
    if isinstance(dataset, Dataset):
        return _of_table(dataset, dataset, field, None)
    if hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):  # a pandas or polars frame
        dataset = dataset.to_dict("records") if hasattr(dataset, "iloc") else dataset.to_dicts()
    if isinstance(dataset, Sequence) and all(isinstance(row, Mapping) for row in dataset):
        return _of_list(dataset, field)
    raise ConfigError(
        f"{field}: a {type(dataset).__name__} is no dataset; give a datasets.Dataset, a list of dicts (one a row), a data "
        f"frame, or the path or hub name of one"
    )


def _of_table(rows: Any, table: Any, field: str, split: str | None) -> HeldRows:
    if not len(rows):
        raise ConfigError(f"{field}: holds no rows; give a dataset with rows")
    return HeldRows(table, tuple(rows.column_names), rows[0], len(rows), split)


def _of_list(rows: Sequence[Mapping[str, Any]], field: str) -> HeldRows:
    if not rows:
        raise ConfigError(f"{field}: is an empty list; give one dict a row")
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_plain))
            lines[-1].encode()  # half of a surrogate pair is no character
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{field}: row {index} cannot be written as JSON ({error}); keep texts, numbers, lists and dicts in it"
            ) from error
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return HeldRows("\n".join(lines) + "\n", columns, rows[0], len(rows))


def _plain(value: Any) -> Any:
    """A NumPy number or array as Python's own; what pandas writes for a missing value is None."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__}")


def _digest(table: Any) -> str:
    """A digest of a table's contents as the `datasets` library keeps it; equal rows of equal origin have the same."""
    parts = table.values() if isinstance(table, Mapping) else [table]
    whole = "".join(f"{len(part)} {part.column_names} {part._fingerprint}" for part in parts)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _once(path: Path, write: Any) -> None:
    """Write a file or folder in one piece, unless it is there."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.rename(path)
    except OSError as error:
        if not path.exists():
            raise ConfigError(
                f"run.dir: the dataset's rows cannot be written to {path} ({error.strerror or error}); set run.dir to a "
                f"place that can be written"
            ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
