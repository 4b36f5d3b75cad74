"""Splits of a number of GPUs between generators and learner ranks, for `pods plan` (pure)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from pods_cluster.sizing.balance import Rates, StepForecast, StepShape, forecast


def cards_needed(shape: StepShape) -> int:
    """Cards that the pools need: each rank has one, whose rest holds as many generators as fit."""
    shared = shape.ranks * math.floor((1 - shape.gpus_per_rank) / shape.gpus_per_worker + 1e-6)
    return shape.ranks + _whole_cards(max(0, shape.generators - shared), shape.gpus_per_worker)


def splits(rates: Rates, shape: StepShape, cards: int) -> list[StepForecast]:
    """Every split of `cards` GPUs that leaves none over where that can be, fastest first.

    Raises ValueError when they are too few for one worker and one rank.
    """
    most = shape.prompts * shape.keep  # a rank without a rollout would only wait
    least = cards_needed(replace(shape, generators=1, ranks=1))
    if cards < least:
        raise ValueError(
            f"--gpus: {cards} cannot hold a generator of {shape.gpus_per_worker:g} GPU(s) and a learner rank; "
            f"give {least}"
        )
    found = []
    ranks = min(cards, most)
    for generators in itertools.count(1):  # more of them never leave room for more ranks
        while ranks and cards_needed(replace(shape, generators=generators, ranks=ranks)) > cards:
            ranks -= 1
        if not ranks:
            break
        found.append(forecast(rates, replace(shape, generators=generators, ranks=ranks)))
    return sorted(found, key=lambda split: (split.step, cards_needed(split.shape)))


def _whole_cards(workers: int, each: float) -> int:
    """Cards that hold so many parts of cards (three of 0.33 and two of 0.5 need one)."""
    return math.ceil(workers * each - 1e-6)
