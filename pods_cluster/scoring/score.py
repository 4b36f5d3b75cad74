"""The request that goes to the scorers, and the score that comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pods_cluster.types import FailureKind


@dataclass(frozen=True, slots=True)
class ScoreFailure:
    """One reward that has no value for one rollout, and the cause."""

    kind: FailureKind
    reward: str
    message: str

    def __str__(self) -> str:
        return f"{self.reward}: {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished rollout as the rewards read it.

    `messages` is the chat prompt, empty where the prompt is plain text. `columns` are the other columns of the row,
    by name. `completion_ids` is for rewards that read token ids or lengths.
    """

    prompt_text: str
    completion: str
    answer: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Rewards of one rollout. `total` is None when a reward that counts is missing: never a silent 0."""

    total: float | None
    parts: dict[str, float | None]
    failures: tuple[ScoreFailure, ...] = ()
