"""Which pool sets the pace of a run, by what its last steps measured (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pods_cluster.telemetry.health_window import Window

RECOMPUTED = 0.25
"""Tokens that engines compute anew under new weights, as a share of those that they sample, from which that is told."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Which pool sets the pace, what would change that, and the share of a step in which the other one waits."""

    text: str
    advice: str = ""
    waiting: float = 0.0


def pace_of(window: Window) -> Pace | None:
    """The pace of the last steps; None while it is not known. Where the pools take turns neither waits for the other."""
    generate, update = window.mean("balance/generate_seconds"), window.mean("balance/update_seconds")
    step = window.mean("timing_s/step")
    if not (generate > 0 and update > 0 and step > 0):
        return None
    waited = window.mean("timing_s/wait")
    if math.isnan(waited):
        return Pace(f"the pools take turns: generating {generate:.1f} s, updating {update:.1f} s a step (staleness: 0)")
    if generate > 1.15 * update:
        share, balanced = min(max(waited, 0.0) / step, 1.0), window.mean("balance/generators")
        enough = f"; about {math.ceil(balanced)} would keep up with it" if math.isfinite(balanced) else ""
        return Pace(
            f"the generators set the pace: the learner waits {share:.0%} of a step",
            f"add generators{enough}{_computed_anew(window)}",
            share,
        )
    if update > 1.15 * generate:
        n = window.mean("balance/rollouts_per_prompt")
        more = f", or use the idle generators with {n:.0f} rollouts a prompt" if math.isfinite(n) else ""
        return Pace(
            f"the learner sets the pace: generating takes {generate / update:.0%} of its time",
            f"add learner ranks{more}",
            1 - generate / update,
        )
    return Pace("both pools are busy")


def _computed_anew(window: Window) -> str:
    """The part of the advice on tokens in flight that new weights had the engines compute anew; empty where they are few."""
    share = window.mean("tokens/recomputed") / max(window.mean("tokens/sampled"), 1.0)
    if not share > RECOMPUTED:  # NaN where it is not measured
        return ""
    return (
        f", or keep the cache over new weights (weights.keep_cache: true): beside the tokens that they sample, engines "
        f"compute {share:.0%} as many anew"
    )
