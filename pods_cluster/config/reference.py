"""The reference page of the configuration, generated from the section classes.

python -m pods_cluster.config.reference > docs/config.md
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
import typing
from itertools import pairwise
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pods_cluster.config.tree import Config


def config_reference(model: type[BaseModel] = Config) -> str:
    """Return the page as Markdown: for each section a table of field, type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `python -m pods_cluster.config.reference > docs/config.md`; do not edit. -->",
        "",
        "A run is one YAML file of these sections. Any field can be set on the command line as well, by its path: "
        "`learner.learning_rate=1e-5`, and in a list by index: `reward.0.weight=2`. Unknown fields are refused.",
        "",
    ]
    top = [name for name, field in model.model_fields.items() if not _sections_in(field.annotation)]
    nested = [name for name in model.model_fields if name not in top]
    if top:
        lines += ["## Top level", "", *_table(model, top), ""]
    for name in nested:
        lines += _section(name, model.model_fields[name])
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, field: FieldInfo) -> list[str]:
    lines: list[str] = []
    for section in _sections_in(field.annotation):
        shape = " (a list)" if _is_list(field.annotation) else ""
        presence = "" if field.is_required() else ", optional" if field.default is None else ""
        lines += [f"## `{path}`{shape}", ""]
        text = " ".join((section.__doc__ or "").split())
        if text or presence or field.is_required():
            needed = "Required. " if field.is_required() else "Off unless given. " if presence else ""
            lines += [f"{needed}{text}", ""]
        lines += [*_table(section, list(section.model_fields)), ""]
        for name, inner in section.model_fields.items():
            if _sections_in(inner.annotation):
                lines += _section(f"{path}.{name}", inner)
    return lines


def _table(model: type[BaseModel], names: list[str]) -> list[str]:
    rows, texts = ["| field | type | default | meaning |", "|---|---|---|---|"], field_texts(model)
    for name in names:
        field = model.model_fields[name]
        inner = _sections_in(field.annotation)
        meaning = " ".join(texts.get(name, "").split())
        if not meaning and inner:
            meaning = f"{' '.join((inner[0].__doc__ or '').split())} See below."
        cells = (f"`{name}`", _type_text(field), _default_text(field), meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """The texts that stand under a section's fields in its source.

    Not pydantic's `use_attribute_docstrings`: that reads them in every process that imports the configuration.
    """
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if not issubclass(part, BaseModel) or part is BaseModel:
            continue
        (section,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = inspect.cleandoc(meaning)
    return found


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (list, tuple)


def _type_text(field: FieldInfo) -> str:
    return _annotation_text(field.annotation) + _limits_text(field)


def _annotation_text(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if annotation is Any:
        return "any"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation_text(part) for part in args)
    if origin is typing.Literal:
        return " or ".join(f"`{_value_text(value)}`" for value in args)
    if origin is list or (origin is tuple and len(args) == 2 and args[1] is Ellipsis):
        return f"list of {_annotation_text(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(_annotation_text(part) for part in args) + "]"
    if origin is dict:
        return f"mapping of {_annotation_text(args[0])} to {_annotation_text(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _limits_text(field: FieldInfo) -> str:
    texts = []
    for rule in field.metadata:
        match rule:
            case Ge(ge=bound):
                texts.append(f"≥ {bound}")
            case Gt(gt=bound):
                texts.append(f"> {bound}")
            case Le(le=bound):
                texts.append(f"≤ {bound}")
            case Lt(lt=bound):
                texts.append(f"< {_bound_text(bound)}")
            case MinLen(min_length=bound) if _is_list(field.annotation):
                texts.append(f"at least {bound}")
            case MinLen():
                texts.append("not empty")
            case MaxLen(max_length=bound):
                texts.append(f"at most {bound} long")
            case _:
                pass
    return f", {', '.join(texts)}" if texts else ""


def _bound_text(bound: Any) -> str:
    if isinstance(bound, int) and bound > 2**31 and bound & (bound - 1) == 0:
        return f"2^{bound.bit_length() - 1}"
    return str(bound)


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return "as below"
    return f"`{_value_text(value)}`"


def _value_text(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}{e}{int(exponent)}" if e else mantissa
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    print(config_reference(), end="")
