"""A reward's configuration as a scorer process gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pods_cluster.config import RewardConfig


@dataclass(frozen=True, slots=True)
class SentReward:
    """The fields of a `RewardConfig` that loading and calling the reward take.

    Without pydantic and the whole configuration, whose import takes several times as long as all else that a scorer process
    does before it scores.
    """

    name: str
    style: Literal["auto", "trl", "verl"]
    range: tuple[float, float] | None
    completions: Literal["auto", "text", "messages"]
    options: Mapping[str, Any]
    code: str | None

    @classmethod
    def of(cls, reward: RewardConfig) -> SentReward:
        """The fields of this reward."""
        return cls(reward.name, reward.style, reward.range, reward.completions, reward.options, reward.code)
