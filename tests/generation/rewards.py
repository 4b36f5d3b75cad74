"""Rewards for the worker's tests: functions of the text alone."""

from __future__ import annotations


def first_token_is_digit(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
    """1 where the completion starts with a digit; nothing for a completion without text."""
    return [float(text[0].isdigit()) if text else None for text in completions]


def length(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
    return [float(len(text)) for text in completions]
