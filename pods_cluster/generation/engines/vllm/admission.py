"""Admission in portions: new rollouts enter a full engine together, so that most of its steps only decode.

vLLM replays one captured graph for a step in which every sequence decodes one token. A step that reads a prompt as well
runs without it, and takes several times as long where the host is the bound (models up to about 1B). An engine that is
kept full has a few free places after each step: filled at once, nearly every step would be such a mixed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PORTION = "pods_admission_portion"
"""Key of vLLM's `additional_config` under which the scheduler finds its portion."""


def portion_of(additional_config: Any) -> int:
    """Free places that new rollouts wait for; 1 (as vLLM does it) where nothing is said."""
    return int(additional_config.get(PORTION, 1)) if isinstance(additional_config, Mapping) else 1


class AdmissionGate:
    """Opens when a portion of the places is free, and stays open until the places are full or nobody waits.

    So a batch that needs several steps for its prompts, or rollouts that start again under new weights, are not cut off
    when less than a portion is left. Whoever waits gets in: what runs ends, so that places come free.
    """

    def __init__(self, portion: int) -> None:
        """`portion`: 1 opens for every free place."""
        if portion < 1:
            raise ValueError(f"a portion of {portion} places: it must be at least 1")
        self._portion = portion
        self._open = False

    def opens(self, free: int) -> bool:
        """Whether new rollouts may enter now, with so many places free."""
        self._open = self._open or free >= self._portion
        return self._open

    def entered(self, free: int, waiting: int) -> None:
        """Say how many places are free, and how many wait, after those that could have entered."""
        if free < 1 or not waiting:
            self._open = False
