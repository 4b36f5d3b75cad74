"""The files of `benchmarks/results/`: JSON with one record a line and no more digits than a measurement has.

`table` turns records that share their keys into columns and rows, so that a series of a hundred steps names its columns
once; `records` turns it back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 160
"""Longest line that an object or a list is put on whole."""
DIGITS = 6
"""Significant digits of a float; numbers above 1,000 keep three decimals (they may be times)."""


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a benchmark's result; folders on the way are made. Values that JSON does not know are written as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result), encoding="utf-8")


def render(result: Mapping[str, Any]) -> str:
    """The text of a result file. Reading it and rendering it again gives the same text."""
    plain = json.loads(json.dumps(result, ensure_ascii=False, default=str))
    return _lines(_rounded(plain), 0) + "\n"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[Any]]:
    """These columns of the records; a record that lacks one has null there."""
    return {"columns": list(columns), "rows": [[row.get(column) for column in columns] for row in rows]}


def records(found: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The records of a `table`."""
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = round(value, max(3, DIGITS - 1 - math.floor(math.log10(abs(value))))) if value else 0.0
    return int(short) if short == int(short) else short


def _lines(value: Any, depth: int) -> str:
    """The value on one line where it fits, else its parts on lines of their own. Plain lists stay on one line."""
    whole = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or depth + len(whole) <= WIDTH:
        return whole
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(item, depth + 1)}" for key, item in value.items()]
        return "{" + inner + f",{inner}".join(parts) + "\n" + " " * depth + "}"
    if not any(isinstance(item, (dict, list)) for item in value):
        return whole
    return "[" + inner + f",{inner}".join(_lines(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
