"""The kinds of fault of a soak, and their schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks._faulted_run import Fault

KILLS = (
    *(Fault(role) for role in ("generator", "learner", "selector", "controller", "scorer")),
    Fault("generator", all=True),
    Fault("learner", all=True),
    Fault("gcs"),
    Fault("command"),
    Fault("command", "end"),
)
OFTEN = tuple(Fault(role) for role in ("generator", "learner", "selector", "scorer"))
"""What comes twice in each round, as parts fail more often than whole pools and commands."""
SLOW = tuple(Fault(role, "stop") for role in ("generator", "learner", "selector", "controller", "scorer", "gcs"))
"""What is noticed by silence, after some seconds; one of these each round."""
EXACT = ("learner", "selector", "controller", "gcs", "command")
"""What fails without a trace in the weights: all else goes on from a state, with the same random streams. A lost generator's
groups come again as other attempts, and a killed scorer's reward is left out."""


def schedule_of(
    steps: int, every: int, seed: int, kills: Sequence[Fault] = KILLS, slow: Sequence[Fault] = ()
) -> list[tuple[int, Fault]]:
    """A fault each `every` steps: all kills in turn and one that is slow, each round in an order of its own."""
    draw = random.Random(seed)
    slowly, left, found = list[Fault](), list[Fault](), list[tuple[int, Fault]]()
    for step in range(every, steps - 1, every):
        if not left:
            if slow and not slowly:
                slowly = draw.sample(list(slow), len(slow))
            round_ = [*kills, slowly.pop()] if slow else list(kills)
            left = draw.sample(round_, len(round_))
        found.append((step, left.pop()))
    return found
