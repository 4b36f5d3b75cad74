"""Numbers as people read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
MISSING = "–"


def compact(value: float | None, digits: int = 3) -> str:
    """A number in about `digits` digits: 0.123, 12.3, 1,234, 56.7k, 1.2M."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, factor, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit * 0.9995:
            return f"{value / factor:.1f}{unit}"
    if value == int(value):
        return f"{int(value):,}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.{max(digits - 2, 0)}e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}" if size >= 1 else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """0.12 s, 1.8 s, 42 s, 3:05 min, 2:03 h, 1 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    seconds = max(seconds, 0.0)
    if 0 < seconds < 0.995:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return MISSING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of some values in one line of bars; means of equal spans where there are more than `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) > width:
        edges = [round(index * len(finite) / width) for index in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(finite), max(finite)
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        return BARS[3] * len(finite)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in finite)


def plain_text(text: object, limit: int = 300) -> str:
    """One line that is safe on a terminal: no control characters, no line breaks, cut at `limit`."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
