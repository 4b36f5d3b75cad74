"""The request that goes to the scorers, and the score that comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """The kinds of failure that leave a rollout without a reward. Each is a metric, `scoring/failures/<kind>/<reward>`."""

    TIMEOUT = "timeout"  # ran past its time and was killed
    ERROR = "error"  # raised, or returned something that is no number
    DIED = "died"  # took its process down
    MEMORY = "memory"  # held more than scoring.memory_limit, or found no memory
    NONE = "none"  # returned None where None is no answer
    NAN = "nan"
    INFINITE = "infinite"
    LENGTH = "length"  # returned a list of another length than the completions
    RANGE = "range"  # returned a value outside the range that it declares
    START = "start"  # its process could not be started again
    CLOSED = "closed"  # the pool was closed before it ran


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
    """One finished rollout, as the rewards read it.

    `messages` is the chat prompt, empty where the prompt is plain text. `columns` are the other columns of the row by
    name. `completion_ids` is for rewards that read token ids or lengths. Of several turns `completion` is the text of the
    last one, `completion_ids` are the tokens that the model sampled in all, and `turns` the chat messages after the prompt;
    `environment_reward` is what the environment gave.
    """

    prompt_text: str
    completion: str
    answer: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] | None = None
    turns: Sequence[Mapping[str, Any]] = ()
    environment_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one rollout by name, and their weighted sum.

    `total` is None when a reward that counts has no value: never a silent 0.
    """

    total: float | None
    parts: dict[str, float | None]
    failures: tuple[ScoreFailure, ...] = ()
