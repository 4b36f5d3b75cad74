"""Node labels that a pool asks for (`generator.place`, `learner.place`): their form, and whether a node has them (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator

from pods_cluster.config.base import refuse

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:{_NAME}/)?{_NAME}")
_ONE = re.compile(rf"(!?)({_NAME})")
_SEVERAL = re.compile(rf"(!?)in\(({_NAME}(?:, ?{_NAME})*)\)")


def wrong_labels(place: Mapping[str, str]) -> Iterator[str]:
    """Sentences about the labels that Ray would refuse: keys and values are those of Kubernetes."""
    for key, value in place.items():
        if not _KEY.fullmatch(key):
            yield f"{key!r} is no label: use letters, digits, '-', '_' and '.', with a prefix before '/' if need be"
        if not (_ONE.fullmatch(value) or _SEVERAL.fullmatch(value)):
            yield f"{key}: {value!r} is no condition; write value, '!value', 'in(a, b)' or '!in(a, b)'"


def _check(place: dict[str, str]) -> dict[str, str]:
    refuse(wrong_labels(place))
    return place


Labels = Annotated[dict[str, str], AfterValidator(_check)]
"""Type of a field with labels."""


def has_labels(place: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these `labels` is one that `place` asks for. A label that it lacks equals nothing."""
    return all(_holds(value, labels.get(key)) for key, value in place.items())


def _holds(condition: str, label: str | None) -> bool:
    found = _SEVERAL.fullmatch(condition) or _ONE.fullmatch(condition)
    assert found is not None, condition
    return (label in re.split(r", ?", found[2])) != bool(found[1])


def describe_labels(place: Mapping[str, str]) -> str:
    """The labels as they are written on a command line."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in place.items()) + "}"
