"""Reward functions under the names that `trl.rewards` has: correctness, the think format, the length.

They follow TRL's convention and may be used beside a user's own. Answers are compared by `scoring.builtin.math_answer`,
which accepts more forms of a right answer than TRL does (`####` and a number at the end of the text).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pods_cluster.scoring.builtin import math_answer, soft_overlong

Completion = str | Sequence[dict[str, Any]]


def accuracy_reward(completions: Sequence[Completion], solution: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 where the final answer of a completion equals the row's `solution`, else 0; None for a row without one."""
    return [
        None if gold is None or not str(gold).strip() else math_answer(_text(completion), str(gold))
        for completion, gold in zip(completions, solution, strict=True)
    ]


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **_: Any,
) -> list[float | None]:
    """Score 1 if the answer after the reasoning is right, else 0; 0 where the reasoning has no end."""
    texts = [_text(completion) for completion in completions]
    ends = [next((text.rpartition(mark)[2] for mark in reasoning_delimiters if mark in text), None) for text in texts]
    scores = accuracy_reward([end or "" for end in ends], solution)
    return [0.0 if end is None else score for end, score in zip(ends, scores, strict=True)]


def think_format_reward(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 where a completion is one `<think>` block with something after it, else 0."""
    pattern = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
    return [float(pattern.match(_text(completion)) is not None) for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A penalty on length in tokens: 0 up to the last `soft_punish_cache` tokens, then down to -1 (arXiv 2503.14476)."""

    def soft_overlong_punishment(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [
            soft_overlong(ids, max_tokens=max_completion_len, soft_tokens=soft_punish_cache) for ids in completion_ids
        ]

    return soft_overlong_punishment


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])
