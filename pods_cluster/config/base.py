"""The base class of every section of the configuration, and the error that a bad configuration raises."""

from __future__ import annotations

import functools
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from pods_cluster.wording import counted

LARGEST = 2**63
"""Largest whole number in a configuration: more than any count, and as much as numpy and torch take."""

LONGEST_WAIT = 1e8
"""Seconds that any limit of time may have: three years. What waits (sockets, Ray, torch) takes no time of any size."""
MOST_WORKERS = 10_000
"""Workers of a pool: ten times what has been thought through. Each is a task of the controller's, so that a slip of the finger
would end the run."""

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no file, column or name can have."""


_VARIABLE = re.compile(r"\$[({]?[A-Za-z_]")
LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Bytes of a path, and of each name in it, that Linux takes."""


class ConfigError(Exception):
    """A configuration that cannot be run. The text names each field, its value and the fix."""

    @classmethod
    def listing(cls, source: str, problems: Sequence[object]) -> ConfigError:
        """All problems of `source` in one error, a line each."""
        lines = "\n".join(f"  - {problem}" for problem in problems)
        return ConfigError(f"{source}: {counted(len(problems), 'problem')}\n{lines}")


class Problems(ValueError):
    """Several problems of one section, or of sections together; `texts` has a sentence for each."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        super().__init__("; ".join(self.texts))


def refuse(problems: Iterable[str]) -> None:
    """Raise Problems where there is any."""
    texts = list(problems)
    if texts:
        raise Problems(texts)


def usable_path(value: str | None) -> str | None:
    """Return a path, a hub's name, or `file.py:name`, as it is. Raises ValueError for what could be no file's path anywhere.

    Variables are refused, not put in: a configuration means the same on each node. A text with braces or several lines is no
    path.
    """
    if value is None or "\n" in value or ("{" in value and not value.startswith("${")):
        return value
    if not value.strip():
        raise ValueError(f"{value!r} is blank; give a path")
    variable = _VARIABLE.search(value)
    if variable is not None and not os.path.lexists(
        value[: (value + "/").index("/", variable.start())]
    ):  # no such name
        raise ValueError(
            f"{value!r} holds a variable, which is not put in here; write the path out, or give the field on the command "
            f"line, where the shell puts it in"
        )
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise ValueError(
            f"{value!r} names the home folder of a user whom this machine does not have; write the path out"
        )
    encoded = os.fsencode(value)
    if len(encoded) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in encoded.split(b"/")):
        raise ValueError(f"{value[:60] + '…'!r} is longer than a path can be; shorten it")
    return value


def problems_of(check: Callable[[], object]) -> list[str]:
    """The problems that a check tells by raising ValueError; empty where it passes."""
    try:
        check()
    except Problems as error:
        return error.texts
    except ValueError as error:
        return [str(error)]
    return []


class Section(BaseModel):
    """A part of the configuration: unknown fields, NaN and infinity are refused; a built section does not change.

    The text under a field is its documentation (`config.reference` reads it from the source when it is asked for).
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # `Config` builds its sections' validators with its own, on first use: few processes need any
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _values_are_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic accepts: true as 1, NaN in the free-form options of a plug-in, and texts that no file,
        column or name can be."""
        if isinstance(value, str) and _UNUSABLE.search(value):
            raise ValueError(f"{value!r} holds a character that no path or name can have (\\0, \\ud800); remove it")
        if isinstance(value, int) and abs(value) > LARGEST:
            shown = f"{str(value)[:30]}… ({len(str(abs(value)))} digits)"
            raise ValueError(f"{shown} is too large; give a number that fits into 64 bits")
        if isinstance(value, bool) and _is_number(cls, str(info.field_name)):
            raise ValueError(f"{str(value).lower()} is not a number; write one")
        if isinstance(value, dict | list | tuple) and _is_free_form(cls, str(info.field_name)):
            bad = _not_finite(value)
            if bad is not None:
                raise ValueError(f"{bad} is refused: numbers must be finite")
        return value


@functools.cache
def _is_number(section: type[Section], field: str) -> bool:
    """Whether a field takes a number and no true or false."""
    annotation = section.model_fields[field].annotation
    members = set(typing.get_args(annotation)) or {annotation}  # of a union, or the one type
    return bool(members & {int, float}) and bool not in members


@functools.cache
def _is_free_form(section: type[Section], field: str) -> bool:
    """Whether a field takes the options of a plug-in, which pydantic does not look into."""
    return typing.get_origin(section.model_fields[field].annotation) is dict


def _not_finite(value: Any) -> float | None:
    """Return the first NaN or infinity in nested options, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((bad for item in inner if (bad := _not_finite(item)) is not None), None)
