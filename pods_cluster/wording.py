"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 generator", "2 generators", "3 micro-batches", "1,024 rollouts"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def age(seconds: float) -> str:
    """A time that has passed, in its largest whole unit: "12 s", "3 min", "2 h", "5 d"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
