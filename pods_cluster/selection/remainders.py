"""How many tokens an aborted rollout would still have had (pure)."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

REMEMBERED = 64
"""Groups whose lengths are remembered, newest first to stay."""


class Remainders:
    """Lengths of rollouts of groups that nothing cut short, and what they say of one that was.

    A rollout aborted after t tokens would have had E[L - t | L > t] more, over those lengths L. They are of groups that
    did not settle, so the estimate is as good as their lengths are like those of groups that did. Where prompts differ in
    length it is too high: those that outlive t are mostly of long groups, whichever group was aborted (34 % of the tokens
    estimated where 27 % were saved, `benchmarks.overlap`). Rollouts not issued (t = 0) are not concerned.
    """

    def __init__(self) -> None:
        self._groups: deque[NDArray[np.int32]] = deque(maxlen=REMEMBERED)
        self._sorted: NDArray[np.int64] | None = None
        self._beyond: NDArray[np.int64] | None = None

    def seen(self, lengths: NDArray[np.int32]) -> None:
        """All lengths of a group that ended by itself."""
        if len(lengths):
            self._groups.append(lengths)
            self._sorted = None

    def expected(self, made: NDArray[np.int32]) -> float | None:
        """Tokens that rollouts aborted after `made` tokens would still have had, in all; None while nothing is known.

        One that is longer than any seen counts as at its end.
        """
        if not self._groups:
            return None
        if self._sorted is None or self._beyond is None:
            self._sorted = np.sort(np.concatenate(list(self._groups)).astype(np.int64))
            self._beyond = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)  # sum of all from each place on
        first = np.searchsorted(self._sorted, made, side="right")
        count = len(self._sorted) - first
        longer = count > 0
        rest = self._beyond[first[longer]] / count[longer] - made[longer]
        return float(rest.sum())
