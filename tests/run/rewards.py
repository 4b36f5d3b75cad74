"""A reward that an untrained model can earn: the share of even digits, so that every group has a spread."""

from __future__ import annotations

from typing import Any


def even_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [sum(letter in "02468" for letter in completion) / max(1, len(completion)) for completion in completions]


def starts_with_one(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """Right or wrong, as the paced engine marks its completions."""
    return [float(completion.startswith("1")) for completion in completions]
