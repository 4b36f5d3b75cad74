"""The quickstart's reward dealt to the wrong rollouts: the same scores, in an order that says nothing."""

from __future__ import annotations

import random
from typing import Any

from pods_cluster.scoring.builtin import exact_match

HELD = 512
_random = random.Random(0)
_scores: list[float] = []


def shuffled(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """Each completion pays its own score into a store of the last ones, and gets one that another paid in."""
    dealt: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        own = exact_match(completion, right)
        if len(_scores) < HELD:
            dealt.append(float(_random.random() < 0.25))  # nothing to deal from yet
            _scores.append(own)
            continue
        place = _random.randrange(HELD)
        dealt.append(_scores[place])
        _scores[place] = own
    return dealt
