"""A reward that differs from completion to completion, so that every group has a signal."""

from __future__ import annotations

from typing import Any


def score(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(ord, text)) % 7 / 6 for text in completions]
