"""A reward that made-up completions can earn: the share of even digits, so that every group has a spread."""

from __future__ import annotations

from typing import Any


def even_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:  # noqa: ARG001
    """TRL's shape: one number a completion."""
    return [sum(letter in "02468" for letter in completion) / max(1, len(completion)) for completion in completions]
