"""All problems of a configuration in sentences: what pydantic refuses, and the rules between fields that it breaks."""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from pods_cluster.config.base import Problems
from pods_cluster.config.foreign_names import foreign_fields, own_value
from pods_cluster.config.tree import Config

ROUNDS = 5
"""Fields that are refused hide the rules between them: so often they are taken out and the rest is looked at again."""
_REPR = reprlib.Repr()
"""Prints the beginning of any value, however large it is."""
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxtuple = 4, 8, 8, 8
_REPR.maxstring = _REPR.maxother = 80
STAND_INS: dict[str, Any] = {"model": {"path": "model"}, "data": {"path": "data"}, "run": {"name": "run"},
                             "reward": [{"name": "reward"}], "model.path": "model", "data.path": "data",
                             "run.name": "run"}  # fmt: skip
"""Values of fields without a default, for looking at the rest."""


def explain(tree: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Each problem in one line: the field, its value and the fix.

    Rules between sections are only looked at where each section is valid. So refused fields are put back to their
    defaults and the rest is validated again; what is found then and speaks of one of those fields is left out.
    """
    rest, found, refused = copy.deepcopy(dict(tree)), _explained(error), _refused(error)
    for _ in range(ROUNDS):
        for item in error.errors():
            _take_out(rest, item)
        try:
            Config.model_validate(rest)
        except ValidationError as more:
            error = more
        else:
            break
        found += [text for text in _explained(error) if text not in found and not _speaks_of(text, refused)]
        refused |= _refused(error)
    return found


def _explained(error: ValidationError) -> list[str]:
    texts = [text for item in _joined(error.errors()) for text in _sentences(item)]
    return list(dict.fromkeys(texts))


def _joined(items: Sequence[Any]) -> Iterator[Any]:
    """The errors, those of one field's alternatives (a number or `auto`) as one."""
    alternatives: dict[str, list[Any]] = {}
    for item in items:
        key = _path(item["loc"]) if item["type"] not in _APART else str(len(alternatives))
        alternatives.setdefault(key, []).append(item)
    for found in alternatives.values():
        messages = list(dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in found))
        yield found[0] if len(messages) == 1 else {**found[0], "msg": f"Input should be {' or '.join(messages)}"}


_APART = ("extra_forbidden", "missing", "value_error", "invalid_key")
"""Kinds of errors that are no alternatives of one another."""


def _sentences(item: Any) -> list[str]:
    """The sentences of one pydantic error, as `field: value …; fix`."""
    where = _path(item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown(where, item["loc"], item["input"])
    if item["type"] == "missing":
        return [f"{where}: missing; it has no default, add it"]
    if item["type"] == "invalid_key":
        return [f"{where}: {item['input']!r} is no field's name; write a word, or put quotes around it"]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        cause = item.get("ctx", {}).get("error")
        texts = cause.texts if isinstance(cause, Problems) else [message]
        # a rule of a section names its field itself
        return [
            text if not where else f"{where}.{text}" if re.match(r"[a-z_]+: ", text) else f"{where}: {text}"
            for text in texts
        ]
    fix = "; put it in quotes" if item["type"] == "string_type" and isinstance(item["input"], int | float) else ""
    if item["type"] == "model_type":
        message, fix = "It must be a section of fields", "; write its fields below it, as in {name: …}"
    if item["type"] == "list_type" and isinstance(item["input"], str | Mapping):
        fix = (
            "; write a list, as in ["
            + ("{name: …}" if isinstance(item["input"], Mapping) else str(item["input"])[:40])
            + "]"
        )
    if item["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", item["msg"])
        meant = own_value(where, item["input"]) or _close(str(item["input"]), choices)
        fix = f"; did you mean {meant}?" if meant else ""
    return [f"{where}: {_short(item['input'])} is refused: {message[0].lower()}{message[1:]}{fix}"]


def _unknown(where: str, location: tuple[Any, ...], value: Any) -> list[str]:
    """An unknown field: what it is called here, where another trainer's name was typed; else what was meant, or is known."""
    if foreign := foreign_fields(where, value):
        return [f"{name}: unknown field (value {_short(leaf)}); {text}" for name, leaf, text in foreign]
    name = str(location[-1])
    known = list(_section_at(location[:-1]).model_fields)
    elsewhere = [path for path in field_paths() if path.rpartition(".")[2] == name]
    if elsewhere:
        hint = f"it belongs to {' or '.join(path.rpartition('.')[0] or 'the top' for path in elsewhere[:3])}: write "
        hint += " or ".join(elsewhere[:3])
    elif close := _close(name, known):
        hint = f"did you mean {close}?"
    else:
        hint = f"known here: {', '.join(known)}"
    return [f"{where}: unknown field (value {_short(value)}); {hint}"]


@cache
def field_paths() -> tuple[str, ...]:
    """Dotted path of every field, sections among them; fields of a list's items under index 0."""
    found: list[str] = []

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            found.append(prefix + name)
            inner, is_list = _section_of(field.annotation)
            if inner is not None:
                walk(inner, f"{prefix}{name}.{'0.' if is_list else ''}")

    walk(Config, "")
    return tuple(found)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, also within a union or a list, and whether it is a list."""
    candidates, is_list = [annotation], False
    while candidates:
        candidate = candidates.pop()
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate, is_list
        is_list = is_list or typing.get_origin(candidate) is list
        candidates.extend(typing.get_args(candidate))
    return None, False


def _section_at(location: tuple[Any, ...]) -> type[BaseModel]:
    """The section at a path of field names and list indices."""
    section: type[BaseModel] = Config
    for part in location:
        if isinstance(part, int) or part not in section.model_fields:
            continue
        section = _section_of(section.model_fields[part].annotation)[0] or section
    return section


def _refused(error: ValidationError) -> set[str]:
    """Paths of fields that will not have the values that were meant: refused, or meant by an unknown name."""
    found: set[str] = set()
    for item in error.errors():
        where = _path(item["loc"])
        if item["type"] == "extra_forbidden":
            found.update(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", " ".join(_sentences(item)).split("; ", 1)[-1]))
        elif item["type"] == "value_error" and where:
            found.update(re.match(r"[a-z_0-9.]*", text).group().rstrip(".") for text in _sentences(item))  # type: ignore[union-attr]
        elif where:
            found.add(where)
    return found


def _speaks_of(text: str, paths: set[str]) -> bool:
    return any(re.search(rf"\b{re.escape(path)}\b", text) for path in paths)


def _take_out(tree: dict[str, Any], item: Any) -> None:
    """Remove the value that an error is about, so that its default holds; a stand-in where there is no default."""
    paths = [_path(item["loc"])]
    if item["type"] == "value_error":
        texts = [] if not paths[0] else _sentences(item)
        named = [re.match(r"[a-z_0-9.]*", text).group().rstrip(".") for text in texts]  # type: ignore[union-attr]
        paths = [path for path in named if path != paths[0]] or paths
    for path in paths:
        *parents, last = path.split(".")
        node: Any = tree
        for part in parents:
            node = _inner(node, part)
        if isinstance(node, dict):
            node.pop(last, None)
            if path in STAND_INS:
                node[last] = copy.deepcopy(STAND_INS[path])
        elif isinstance(node, list) and last.isdigit() and int(last) < len(node):
            node[int(last)] = {"name": "reward"}
        if re.fullmatch(r"reward\.\d+\.name", path) and isinstance(node, dict):
            node[last] = f"reward_{parents[-1]}"


def _inner(node: Any, part: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    return node.get(part) if isinstance(node, dict) else None


def _path(location: tuple[Any, ...]) -> str:
    # pydantic puts the tried member of a union (`tuple[str, ...]`, `int`) behind the field
    parts = [str(part) for part in location if "[" not in str(part)]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in ("int", "float", "str", "bool") else parts)


def _close(name: str, known: typing.Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def _short(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
