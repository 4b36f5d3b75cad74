"""The bound on restarts of a run's parts, with back-off (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from pods_cluster.run.errors import RunError

GOOD_STEPS = 10
"""Steps after which a restart counts no more: what failed then had nothing to do with what fails now."""
FIRST_WAIT = 5.0
"""Seconds before the second restart in a row; the first comes at once, each later one after three times as long."""
WAIT_GROWTH = 3.0
LONGEST_WAIT = 60.0


@dataclass(slots=True)
class Restarts:
    """Restarts of a run so far; at most `limit` in a row (`run.restarts`) without `GOOD_STEPS` steps in between."""

    limit: int
    in_a_row: int = 0
    first_cause: str = ""
    _went_on_from: int = 0

    def failed(self, cause: str, step: int) -> float:
        """Count a failure after `step` steps; returns the seconds to wait before the restart.

        Raises RunError, with the first cause, when no restart is left.
        """
        if self.in_a_row and step - self._went_on_from >= GOOD_STEPS:
            self.in_a_row = 0
        if not self.in_a_row:
            self.first_cause = cause
        if self.in_a_row >= self.limit:
            raise RunError(self._give_up(cause))
        self.in_a_row += 1
        return 0.0 if self.in_a_row == 1 else min(FIRST_WAIT * WAIT_GROWTH ** (self.in_a_row - 2), LONGEST_WAIT)

    def going_on(self, step: int) -> None:
        """The run goes on from the state of this step."""
        self._went_on_from = step

    def _give_up(self, last: str) -> str:
        if not self.limit:
            return f"{last} (run.restarts: 0 starts nothing again; --resume goes on from the newest saved state)"
        again = "" if last == self.first_cause else f"; the last time: {last}"
        return (
            f"{self.first_cause}. The run was started again {self.limit} times (run.restarts) and failed within "
            f"{GOOD_STEPS} steps each time{again}. --resume goes on from the newest saved state"
        )
