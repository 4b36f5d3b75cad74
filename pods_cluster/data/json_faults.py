"""A slow, exact reading of a JSON file that the `datasets` library could not read: it finds the fault, or the rows."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

from pods_cluster.data.file_kinds import LFS_POINTER, OTHER_KINDS


def first_fault(path: Path) -> str | None:
    """Say where and why the file is no table of JSON objects (`line 3 …`); None when plain JSON finds no fault."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
        if begin == LFS_POINTER:
            return "is a pointer of Git LFS in place of the file (git lfs pull brings that)"
        for magic, kind in OTHER_KINDS.items():
            if begin.startswith(magic):
                return f"is not UTF-8 text but {kind}"
        return _array_fault(path) if is_array(path) else _lines_fault(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except RecursionError:
        return "holds a value that is nested too deeply to be read"


# Half of a surrogate pair, as an escape: not before or behind its other half.
_HALF_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)


def half_pair(path: Path) -> str | None:
    r"""Name the line that holds half of a surrogate pair (`"\ud800"`), which JSON allows and no text can hold; or None."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if b"\\u" not in line:
                continue
            for match in _HALF_PAIR.finditer(line):
                before = line[max(0, match.start(1) - 6) : match.start(1)]
                if not re.fullmatch(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}", before):
                    return f"line {number} holds {match[1].decode()}, half of a surrogate pair, which is no character"
    return None


def is_utf8(path: Path) -> bool:
    """Whether the whole file is UTF-8: the library's reader lets bad bytes pass, and they fail when a row is read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def read_objects(path: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a file without a fault (lines, or an array); None when it is one document and no table."""
    if is_array(path):
        return json.loads(path.read_bytes())
    if path.suffix == ".json" and _is_one_document(path):
        return None
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def is_array(path: Path) -> bool:
    """Whether a `.json` file is one array of rows."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                return line.lstrip().startswith(b"[") and path.suffix == ".json"
    return False


def _lines_fault(path: Path) -> str | None:
    pretty = path.suffix == ".json" and _is_one_document(path)
    if pretty:
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 ({error.reason} at byte {error.start})"
            except json.JSONDecodeError as error:
                return f"line {number} is not valid JSON ({error.msg}, column {error.colno})"
            if not isinstance(value, dict):
                return f"line {number} holds a {type(value).__name__}, not an object with columns"
    return None


def _is_one_document(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        return False


def _array_fault(path: Path) -> str | None:
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        return f"line {error.lineno} is not valid JSON ({error.msg}, column {error.colno})"
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            return f"item {index} holds a {type(value).__name__}, not an object with columns"
    return None
