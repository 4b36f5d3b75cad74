"""Metrics that follow from counts: rollouts per trained rollout, of the step and of the run, and rates a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

RATES = {
    "throughput/rollouts_generated": "rollouts/generated",
    "throughput/rollouts_selected": "rollouts/selected",
    "throughput/rollouts_trained": "rollouts/trained",
    "throughput/tokens_sampled": "tokens/sampled",
    "throughput/tokens_trained": "tokens/trained",
    "throughput/updates": "updates",
}
RATIOS = {
    ("rollout_to_update_ratio", "rollout_to_update_ratio/cumulative"): ("rollouts/scored", "rollouts/trained"),
    ("rollout_to_update_ratio/tokens", "rollout_to_update_ratio/tokens_cumulative"): (
        "tokens/sampled",
        "tokens/trained",
    ),
}


class Totals:
    """Sums over the run. `add` takes one record's values and returns the metrics that follow from them.

    A step that trained nothing has no ratio of its own; what it generated counts in the cumulative one.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """`records`: those of the run so far, when it is resumed."""
        self.sums: dict[str, float] = {}
        for record in records:
            self.add(record)

    def add(self, values: Mapping[str, Any]) -> dict[str, float]:
        derived: dict[str, float] = {}
        for names, (made_name, trained_name) in RATIOS.items():
            made, trained = _amount(values, made_name), _amount(values, trained_name)
            if made is None and trained is None:
                continue
            total_made = self._add(made_name, made)
            total_trained = self._add(trained_name, trained)
            if made is not None and trained:
                derived[names[0]] = made / trained
            if total_trained:
                derived[names[1]] = total_made / total_trained
        seconds = _amount(values, "timing_s/step")
        if seconds:
            for rate, count in RATES.items():
                amount = _amount(values, count)
                if amount is not None:
                    derived[rate] = amount / seconds
        return derived

    def _add(self, name: str, amount: float | None) -> float:
        self.sums[name] = self.sums.get(name, 0.0) + (amount or 0.0)
        return self.sums[name]


def _amount(values: Mapping[str, Any], name: str) -> float | None:
    """The value if it is a usable amount: a finite number, not negative."""
    try:
        value = float(values[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) and value >= 0 else None
