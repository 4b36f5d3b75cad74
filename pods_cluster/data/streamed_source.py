"""Finding of the files whose rows are streamed: a file, a folder, or a dataset on the hub."""

from __future__ import annotations

from pathlib import Path

from pods_cluster.data.errors import DataError
from pods_cluster.data.row_range import Split, parse_split
from pods_cluster.data.source import Source, cause_of, is_saved, pick_split, quiet, refuse_subset
from pods_cluster.data.streamed import StreamedRows, open_files


def stream_source(
    path: str, name: str | None, split: str, limit: int | None, block: int, *, field: str = "data"
) -> Source:
    """Find the files of `split` at `path` and read their rows when they are served (`StreamedRows`), at most `limit`.

    `path`: a JSONL or parquet file, a folder of them, or a hub name with `name` as its subset. Raises DataError as
    `load_source` does.
    """
    wanted = parse_split(split, f"{field}.split")
    place = Path(path).expanduser()
    if place.is_file():
        refuse_subset(path, name, field)
        files, origin = [str(place.resolve())], (str(place.resolve()), "", "")
    elif place.is_dir() and is_saved(place):
        raise DataError(
            f"{field}.streaming: {path!r} was written by Dataset.save_to_disk and is not read into memory anyway; leave it out"
        )
    else:
        files = _files_of(path, str(place.resolve()) if place.is_dir() else path, name, wanted, field)
        origin = (str(place.resolve()) if place.is_dir() else path, name or "", wanted.name)
    opened = open_files(files)
    whole = sum(file.rows for file in opened)
    span = wanted.span(whole)
    span = span if limit is None else span[:limit]
    if not len(span):
        raise DataError(f"{field}.path: {path!r} holds no rows to use; give a dataset with rows, or other bounds")
    return Source(StreamedRows(opened, block, span), origin, span, whole)


def _files_of(path: str, place: str, name: str | None, wanted: Split, field: str) -> list[str]:
    """The files of one split as the library finds them, by its rules for their names."""
    from datasets import load_dataset_builder

    with quiet():
        try:
            found = load_dataset_builder(place, name=name).config.data_files or {}
        except Exception as error:
            raise DataError(
                f"{field}.path: {path!r}: no files of rows can be found in the folder, or on the hub by that name "
                f"({cause_of(error)}); correct the name, {field}.name, or make the hub reachable"
            ) from error
    return [str(file) for file in pick_split(found, path, wanted, field)]
