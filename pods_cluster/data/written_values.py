"""Values of a JSON file exactly as they are written there.

Arrow gives a whole column one type: `2` becomes 2.0 beside 0.5, and texts that look like dates become time stamps. A
reference answer is compared as text, so it is read again from the file, number by number as it stands there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from pods_cluster.data.json_faults import is_array


class _Number(str):
    """A number as the digits in the file."""

    __slots__ = ()


def answers_as_written(path: Path, keys: Sequence[str]) -> list[str | None]:
    """Return the value under `keys` of each row of a JSON or JSONL file, as text; None where a row has none."""
    return [_at(row, keys) for row in _rows(path)]


def written_row(line: bytes, keys: Sequence[str]) -> str | None:
    """The value under `keys` of one line of JSON, as `answers_as_written` has it. Raises ValueError for another text."""
    return _at(json.loads(line, parse_float=_Number, parse_int=_Number, parse_constant=_Number), keys)


def as_text(value: Any) -> str | None:
    """Turn a value of a table into the text that rewards compare: whole floats without `.0`, dates in ISO form, bytes as the
    UTF-8 text that they hold. NaN is how tables write a missing number: None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, Decimal):
        return None if value.is_nan() else format(value, "f")
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, (date, time)):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False, default=str)


def without_padding(value: Any) -> Any:
    """Return the value without the nulls with which a table pads objects to one shape, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_padding(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [without_padding(item) for item in value]
    return value


def holds_times(feature: Any) -> bool:
    """Whether a column's type, or one within it, is a date or a time."""
    import pyarrow as pa

    kind = feature if isinstance(feature, pa.DataType) else feature.arrow_schema
    if isinstance(kind, pa.Schema):
        return any(holds_times(field.type) for field in kind)
    if pa.types.is_struct(kind):
        return any(holds_times(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return holds_times(kind.value_type)
    return pa.types.is_temporal(kind)


def value_at(row: Any, keys: Sequence[str]) -> Any:
    """The value under the path `keys`; None where there is none."""
    for key in keys:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def holds_text(features: Any, keys: Sequence[str]) -> bool:
    """Whether the value under `keys` is a text by the table's types."""
    return getattr(value_at(features, keys), "dtype", None) in ("string", "large_string")


def _rows(path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_Number)
    if is_array(path):
        yield from decoder.decode(path.read_text(encoding="utf-8"))
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield decoder.decode(line.strip())


def _at(row: Any, keys: Sequence[str]) -> str | None:
    value = value_at(row, keys)
    if value is None or isinstance(value, str):
        return None if value is None or (isinstance(value, _Number) and value == "NaN") else str(value)
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Turn numbers within a list or an object back into numbers."""
    if isinstance(value, _Number):
        return json.loads(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
