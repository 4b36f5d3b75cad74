"""Loading of rows from a file, a folder, a saved dataset or the Hugging Face hub: memory-mapped, by index.

The `datasets` library does the reading; it is imported on the first load and imports no torch.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pods_cluster.data.errors import DataError, closest
from pods_cluster.data.file_kinds import FORMATS, conversion, is_without_rows
from pods_cluster.data.json_faults import first_fault, half_pair, is_utf8, read_objects
from pods_cluster.data.row_range import Split, parse_split
from pods_cluster.data.streamed import StreamedRows
from pods_cluster.data.written_values import holds_times

if TYPE_CHECKING:
    from datasets import Dataset


class Rows(Protocol):
    """A table: rows by index, each a mapping of column name to value."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    @property
    def column_names(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Loaded rows and their origin.

    `origin` names the whole split (resolved path or hub name, subset, split; the split is empty for one file), `span`
    the part of its rows that was taken: two sources share rows when their origins are equal and their spans meet.
    """

    rows: Dataset | StreamedRows
    origin: tuple[str, str, str]
    span: range
    whole: int

    def __str__(self) -> str:
        return " ".join(part for part in self.origin if part)

    @property
    def table(self) -> Dataset:
        """The rows, which are a table. Raises TypeError where they are streamed."""
        if isinstance(self.rows, StreamedRows):
            raise TypeError(f"{self}: the rows are streamed")
        return self.rows


def load_source(path: str, name: str | None, split: str, limit: int | None = None, *, field: str = "data") -> Source:
    """Load the rows of `split` at `path`, at most the first `limit` of them.

    `path`: a JSONL, JSON or parquet file, a folder of them, a folder written by `Dataset.save_to_disk`, or a hub name
    with `name` as its subset (`a+b`: one after the other). Of one file the split's name is ignored, its bounds
    (`[:500]`) are not.
    Raises DataError, naming the fields under `field`: nothing there, not readable, no such split, no rows.
    """
    wanted = parse_split(split, f"{field}.split")
    place = Path(path).expanduser()
    if place.is_file():
        refuse_subset(path, name, field)
        dataset, origin = _load_file(place, path, field), (str(place.resolve()), "", "")
    elif place.is_dir() and is_saved(place):
        refuse_subset(path, name, field)
        dataset, part = _load_saved(place, path, wanted, field)
        origin = (str(place.resolve()), "", part)
    elif place.is_dir():
        dataset, origin = (
            _load_folder(place, path, name, wanted, field),
            (str(place.resolve()), name or "", wanted.name),
        )
    else:
        dataset, origin = _load_hub(path, name, wanted, field), (path, name or "", wanted.name)
    span = wanted.span(len(dataset))
    span = span if limit is None else span[:limit]
    if not len(span):
        kept = f", {split!r} takes none of its {len(dataset)}" if len(dataset) else ""
        raise DataError(f"{field}.path: {path!r} holds no rows to use{kept}; give a dataset with rows, or other bounds")
    whole = len(dataset)
    return Source(dataset if len(span) == whole else dataset.select(span), origin, span, whole)


def first_blank(rows: Dataset, column: str) -> int | None:
    """Return the index of the first row whose text is null or blank, or whose list is null or empty; None without any."""
    import pyarrow as pa
    import pyarrow.compute as compute

    pc: Any = compute  # its functions are made at import; type checkers do not see them

    table = rows.select_columns([column]).with_format("arrow")
    for start in range(0, len(rows), 65536):
        values = table[start : start + 65536][column]
        blank = pc.is_null(values)
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            blank = pc.or_(blank, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True))
        elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            blank = pc.or_(blank, pc.fill_null(pc.equal(pc.list_value_length(values), 0), True))
        index = pc.index(blank, True).as_py()
        if index >= 0:
            return start + index
    return None


def _load_file(place: Path, path: str, field: str) -> Dataset:
    kind = FORMATS.get(place.suffix.lower())
    if kind is None:
        raise DataError(
            f"{field}.path: {path!r} is a file of an unknown format {place.suffix!r}; known: {', '.join(FORMATS)}; "
            f"{conversion(place, path)}"
        )
    if place.stat().st_size == 0:
        raise DataError(f"{field}.path: {path!r} is an empty file; it holds no rows")
    _check_utf8([place], path, field)
    from datasets import load_dataset

    with quiet():
        try:
            # the library reads data_files as a pattern: a bracket in a folder's name is not one
            found = load_dataset(kind, data_files=glob.escape(str(place.resolve())), split="train")
        except Exception as error:
            if kind == "parquet" and is_without_rows(place):
                raise DataError(f"{field}.path: {path!r} holds no rows to use; give a dataset with rows") from error
            if kind == "json" and first_fault(place) is None and (rows := read_objects(place)) is not None:
                return _from_objects(rows, path, field)
            raise DataError(_unreadable([place], path, error, field)) from error
    if kind == "json" and holds_times(found.features) and (rows := read_objects(place)) is not None:
        return _from_objects(rows, path, field)  # texts that look like dates stay texts
    return found


def _from_objects(objects: list[dict[str, Any]], path: str, field: str) -> Dataset:
    """Make a table in memory, for rows whose columns change along the file (the library infers them by block)."""
    from datasets import Dataset

    names = dict.fromkeys(name for item in objects for name in item)
    columns = {name: [item.get(name) for item in objects] for name in names}
    try:
        return Dataset.from_dict(columns, on_mixed_types="use_json")
    except Exception as error:
        raise DataError(
            f"{field}.path: {path!r} cannot be held as a table ({cause_of(error)}); write numbers beyond 64 bits as texts"
        ) from error


def _load_folder(place: Path, path: str, name: str | None, wanted: Split, field: str) -> Dataset:
    found = (file for file in place.rglob("*") if file.suffix.lower() in FORMATS and file.is_file())
    files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(place).parts))
    kinds = {FORMATS[file.suffix.lower()] for file in files}
    if not files:
        raise DataError(
            f"{field}.path: {path!r} is a folder without data; it needs {', '.join(FORMATS)} files, "
            f"or to be written by Dataset.save_to_disk"
        )
    if len(kinds) > 1:
        raise DataError(
            f"{field}.path: {path!r} mixes JSON and parquet files ({files[0].name}, …); name one file, or keep one"
        )
    _check_utf8(files, path, field)
    from datasets import load_dataset

    def load(subset: str | None) -> Any:
        with quiet():
            try:
                return load_dataset(str(place.resolve()), name=subset)
            except Exception as error:
                if "BuilderConfig" in str(error) or "Config name" in str(error):
                    raise DataError(f"{field}.name: {subset!r} is not a subset of {path!r}: {error}") from error
                raise DataError(_unreadable(files, path, error, field)) from error

    return _subsets(load, path, name, wanted, field)


def is_saved(place: Path) -> bool:
    return (place / "dataset_dict.json").is_file() or (place / "state.json").is_file()


def _load_saved(place: Path, path: str, wanted: Split, field: str) -> tuple[Dataset, str]:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(place))
    except Exception as error:
        raise DataError(
            f"{field}.path: {path!r} is a saved dataset that cannot be loaded ({cause_of(error)}); save it again"
        ) from error
    if isinstance(found, Dataset):
        return found, ""
    return pick_split(found, path, wanted, field), wanted.name


def _load_hub(path: str, name: str | None, wanted: Split, field: str) -> Dataset:
    parts = path.split("/")
    if path.startswith((".", "~")) or len(parts) > 2 or "" in parts or Path(path).suffix.lower() in FORMATS:
        raise DataError(
            f"{field}.path: {path!r} does not exist (looked at {Path(path).expanduser().absolute()}); "
            f"give an existing file or folder, or a Hugging Face hub name such as openai/gsm8k"
        )
    from datasets import load_dataset

    def load(subset: str | None) -> Any:
        try:
            return load_dataset(path, name=subset)
        except Exception as error:
            text = str(error)
            if "BuilderConfig" in text or "Config name" in text:
                raise DataError(f"{field}.name: {subset!r} is not a subset of {path!r}: {text}") from error
            raise DataError(
                f"{field}.path: {path!r} could not be loaded. Tried: the file or folder {Path(path).absolute()} "
                f"(does not exist); the Hugging Face hub and its local cache ({cause_of(error)}). Give the path of a "
                f"downloaded copy, correct the name, or make the hub reachable (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE)"
            ) from error

    return _subsets(load, path, name, wanted, field)


def _subsets(load: Callable[[str | None], Any], path: str, name: str | None, wanted: Split, field: str) -> Dataset:
    """Load the split of one subset, or of several (`algebra+geometry`) one after the other."""
    names = [None] if name is None else [part.strip() for part in name.split("+")]
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"{field}.name: {name!r} names an empty subset or one twice; write them as in algebra+geometry")
    parts = [pick_split(load(part), path, wanted, field) for part in names]
    if len(parts) == 1:
        return parts[0]
    from datasets import concatenate_datasets

    try:
        return concatenate_datasets(parts)
    except Exception as error:
        raise DataError(
            f"{field}.name: the subsets {name!r} of {path!r} do not have the same columns ({cause_of(error)}); name fewer"
        ) from error


def pick_split(found: Any, path: str, wanted: Split, field: str) -> Dataset:
    if wanted.name not in found:
        raise DataError(
            f"{field}.split: {wanted.name!r} is not a split of {path!r}{closest(wanted.name, found)}; "
            f"it has {', '.join(found) or 'none'}"
        )
    return found[wanted.name]


def refuse_subset(path: str, name: str | None, field: str) -> None:
    if name is not None:
        raise DataError(f"{field}.name: {name!r} picks a subset of a hub dataset, but {path!r} is local; leave it out")


def _check_utf8(files: list[Path], path: str, field: str) -> None:
    for file in files:
        if FORMATS[file.suffix.lower()] != "json":
            continue
        if not is_utf8(file):
            raise DataError(_unreadable([file], path, UnicodeError(f"{file.name} is not UTF-8"), field))
        if (fault := half_pair(file)) is not None:
            where = "" if len(files) == 1 else f"{file.name}: "
            raise DataError(f"{field}.path: {path!r}: {where}{fault}; replace it by the character that was meant")


def _unreadable(files: list[Path], path: str, error: Exception, field: str) -> str:
    for file in files:
        if FORMATS[file.suffix.lower()] == "json" and (fault := first_fault(file)):
            where = "" if len(files) == 1 else f"{file.name}: "
            return f"{field}.path: {path!r}: {where}{fault}; correct or remove it"
    kind = FORMATS[files[0].suffix.lower()]
    return f"{field}.path: {path!r} cannot be read as {kind} ({cause_of(error)}); write the file again or convert it"


def cause_of(error: BaseException) -> str:
    """Return the innermost reason: the library wraps it in errors that say only that something failed."""
    while (inner := error.__cause__ or error.__context__) is not None and type(error).__module__.startswith("datasets"):
        error = inner
    return f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off progress bars for local files, which load in a moment, and log lines about faults that an error names."""
    from datasets import disable_progress_bars, enable_progress_bars, logging
    from datasets.utils import are_progress_bars_disabled

    bars, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
