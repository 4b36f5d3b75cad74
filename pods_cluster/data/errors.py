"""Errors in data. The text names a field of the configuration, its value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pods_cluster.config import ConfigError


class DataError(ConfigError):
    """Data that cannot be loaded, recognised, rendered or resumed. A ConfigError: the fix is in the run's YAML."""


class RowError(DataError):
    """A row that cannot be rendered to a prompt. The text names the row."""


def closest(value: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` where one of `known` is close to `value`, else an empty text."""
    match = difflib.get_close_matches(value, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
