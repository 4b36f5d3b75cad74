"""Splits as the configuration writes them: `train`, `train[:500]`, `train[10%:]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pods_cluster.data.errors import DataError

_BOUND = r"-?\d+%?"
_SPLIT = re.compile(rf"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\])?")


@dataclass(frozen=True, slots=True)
class Split:
    """A split's name and the bounds behind it, still as texts: percentages need the number of rows."""

    name: str
    start: str | None = None
    stop: str | None = None

    def span(self, rows: int) -> range:
        """Return the range of row indices, of `rows` in the whole split."""
        start = 0 if self.start is None else _resolve(self.start, rows)
        stop = rows if self.stop is None else _resolve(self.stop, rows)
        return range(start, max(start, stop))


def parse_split(text: str, field: str) -> Split:
    """Parse a split. Raises DataError naming `field`."""
    match = _SPLIT.fullmatch(text.strip())
    if match is None:
        raise DataError(
            f"{field}: {text!r} is not a split; write its name, as in train, or a part of it, as in train[:500], "
            f"train[500:] or train[:10%]"
        )
    return Split(match["name"], match["start"], match["stop"])


def _resolve(bound: str, rows: int) -> int:
    """Return a bound as an index in [0, rows]; negative ones count from the end, percentages round to the nearest row."""
    index = round(int(bound[:-1]) * rows / 100) if bound.endswith("%") else int(bound)
    return min(max(index + rows if index < 0 else index, 0), rows)
