"""Kinds of files that hold rows: those that are read, how others are converted, and what stands under a false name."""

from __future__ import annotations

from pathlib import Path

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
LFS_POINTER = b"version https://git-lfs"
"""The beginning of what a clone without Git LFS has in place of a large file."""
OTHER_KINDS = {
    b"\x1f\x8b": "compressed by gzip; unpack it (gunzip)",
    b"BZh": "compressed by bzip2; unpack it (bunzip2)",
    b"\xfd7zXZ": "compressed by xz; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive; unpack it (unzip)",
    b"PAR1": "a parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; convert it (datasets.Dataset.from_file)",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}
"""Files of other kinds under the name of a JSON file, by how they begin."""


def conversion(place: Path, path: str) -> str:
    """How a file of an unknown format becomes one of a known: the sentence of an error."""
    suffix = place.suffix.lower()
    if suffix in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"):
        return "unpack it"
    reader = {".csv": "'csv'", ".tsv": "'csv', sep='\\t'", ".txt": "'text'", ".arrow": "'arrow'"}.get(suffix)
    if reader is None:
        return "convert it to one of these, or name it by its format"
    return f"convert it: datasets.load_dataset({reader}, data_files={path!r})['train'].to_json('rows.jsonl')"


def is_without_rows(place: Path) -> bool:
    """Whether a file is whole parquet that holds no row, which the library's reader refuses without saying so."""
    import pyarrow.parquet as parquet

    try:
        return parquet.read_metadata(place).num_rows == 0
    except Exception:  # it is damaged
        return False
