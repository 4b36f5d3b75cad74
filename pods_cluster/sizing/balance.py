"""Which pool waits for which, and what would keep both busy: a step's seconds from the rates of its stages (pure).

A step generates P x n rollouts and trains P x m of them. With staleness 0 the stages take turns; above, generation and
update go on at the same time and the slower one sets the pace. New weights hold up both pools either way.

A batch takes longer than its tokens at the full rate, because its longest rollouts end alone (it drains). With
staleness k there are k + 1 batches out, so a step also takes no less than the way of one of them through generation,
update and publish, divided by k + 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pods_cluster.config import Config


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured or given: completion tokens a second of one saturated generator worker and of one learner rank
    (fetching included), seconds of one publish, mean completion tokens of all and of kept rollouts, seconds that a batch
    drains.

    Raises ValueError naming the rate for one that is not above 0.
    """

    generate: float
    update: float
    sync_seconds: float
    length: float
    kept_length: float
    drain: float = 0.0

    def __post_init__(self) -> None:
        for name, option in (("generate", "--generate-rate"), ("update", "--update-rate"), ("length", "--length"),
                             ("kept_length", "--kept-length")):  # fmt: skip
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{option}: {value:g} must be a number above 0")
        for value, option in ((self.sync_seconds, "--sync-seconds"), (self.drain, "--drain-seconds")):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{option}: {value:g} must be 0 or more")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step asks for (P, n, m, k), and the pools: generator workers of `gpus_per_worker` cards each, ranks of
    `gpus_per_rank` (below 1: generators may have the rest of its card)."""

    prompts: int
    rollouts: float
    keep: int
    staleness: int
    generators: int
    ranks: int
    gpus_per_worker: float = 1.0
    gpus_per_rank: float = 1.0

    @classmethod
    def of(cls, config: Config) -> Shape:
        return cls(
            prompts=config.learner.prompts_per_step,
            rollouts=config.generator.rollouts_per_prompt,
            keep=config.selector.keep,
            staleness=config.staleness,
            generators=config.generator.workers,
            ranks=config.learner.workers,
            gpus_per_worker=config.generator.cards,
            gpus_per_rank=config.learner.gpus_per_worker or 1.0,
        )

    @property
    def cards(self) -> int:
        """That the pools need: each rank has one, whose rest holds as many generators as fit."""
        beside = self.ranks * math.floor((1 - self.gpus_per_rank) / self.gpus_per_worker + 1e-6)
        return self.ranks + _whole_cards(max(0, self.generators - beside), self.gpus_per_worker)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of one step by stage and in all, and the share of it in which each pool has nothing to do.

    `drain` is what a batch takes on top of `generate`. `balanced_rollouts` is the n (not below m) at which generating
    takes as long as updating; `balanced_generators` the number of workers (a fraction) at which it does.
    """

    shape: Shape
    generate: float
    update: float
    sync: float
    drain: float
    balanced_rollouts: int
    balanced_generators: float

    @property
    def pace(self) -> float:
        """Seconds of a step of the slower pool, when it never waits."""
        return max(self.generate, self.update) + self.sync

    @property
    def way(self) -> float:
        """Seconds of one batch from its first token to the weights that it made."""
        return self.generate + self.drain + self.update + self.sync

    @property
    def step(self) -> float:
        k = self.shape.staleness
        return max(self.pace, self.way / (k + 1)) if k else self.way

    @property
    def generator_idle(self) -> float:
        return 1.0 - self.generate / self.step

    @property
    def learner_idle(self) -> float:
        return 1.0 - self.update / self.step

    @property
    def bound(self) -> str:
        """What sets the pace."""
        if not self.shape.staleness:
            return "turns"
        if self.enough_staleness > self.shape.staleness:
            return "staleness"
        return "generators" if self.generate > self.update else "learner"

    @property
    def enough_staleness(self) -> int:
        """The least k at which enough batches are out that the slower pool never waits for one to drain."""
        return max(1, math.ceil(self.way / self.pace * (1 - 1e-9)) - 1)


def stages(rates: Rates, shape: Shape) -> Stages:
    """The step that these rates make of this shape."""
    each = shape.prompts * rates.length / (shape.generators * rates.generate)  # seconds for one more rollout a prompt
    generate = each * shape.rollouts
    update = shape.prompts * shape.keep * rates.kept_length / (shape.ranks * rates.update)
    return Stages(
        shape=shape,
        generate=generate,
        update=update,
        sync=rates.sync_seconds,
        drain=rates.drain,
        balanced_rollouts=max(shape.keep, round(update / each)),
        balanced_generators=shape.generators * generate / update,
    )


def splits(rates: Rates, shape: Shape, cards: int) -> list[Stages]:
    """Every split of `cards` GPUs that leaves none over where that can be, fastest first.

    Raises ValueError when they are too few for one worker and one rank.
    """
    most = shape.prompts * shape.keep  # a rank without a rollout would only wait
    least = replace(shape, generators=1, ranks=1)
    if cards < least.cards:
        raise ValueError(
            f"--gpus: {cards} cannot hold a generator of {shape.gpus_per_worker:g} GPU(s) and a learner rank; "
            f"give {least.cards}"
        )
    found = []
    ranks = min(cards, most)
    for generators in itertools.count(1):  # more of them never leave room for more ranks
        while ranks and replace(shape, generators=generators, ranks=ranks).cards > cards:
            ranks -= 1
        if not ranks:
            break
        found.append(stages(rates, replace(shape, generators=generators, ranks=ranks)))
    return sorted(found, key=lambda split: (split.step, split.shape.cards))


def _whole_cards(workers: int, each: float) -> int:
    """That so many parts of cards need (three of 0.33 and two of 0.5 need one)."""
    return math.ceil(workers * each - 1e-6)


def rates_of(records: Sequence[Mapping[str, Any]]) -> Rates:
    """The rates of a run from its step records; the first step, in which everything starts, is left out if it can be.

    Raises ValueError when the records do not hold what is needed.
    """
    steps = [record for record in records if record.get("tokens/trained") and record.get("timing_s/update")]
    steps = steps[1:] or steps
    if not steps:
        raise ValueError("metrics.jsonl: holds no step that trained something; let the run make some steps first")
    saturated = [
        record["generator/saturated_tokens_per_second"] / max(record.get("generator/workers", 1), 1)
        for record in steps
        if record.get("generator/saturated_tokens_per_second")
    ]
    rollouts, trained = _sum(steps, "rollouts/generated"), _sum(steps, "rollouts/trained")
    if not saturated or not rollouts or not trained:
        raise ValueError(
            "metrics.jsonl: holds no rate of a generator that was busy for a whole second; use longer steps, or give "
            "--generate-rate, --update-rate, --sync-seconds and --length"
        )
    busy = sum(
        (record["timing_s/update"] + record.get("timing_s/fetch", 0.0)) * max(record.get("learner/workers", 1), 1)
        for record in steps
    )
    whole = _sum(steps, "tokens/sampled") - _sum(steps, "tokens/aborted")
    # Where batches took turns (none was out after its step), the stage is the batch's own.
    drains = [
        record["timing_s/generate"]
        - record["tokens/sampled"] / (saturated[-1] * max(record.get("generator/workers", 1), 1))
        for record in steps
        if record.get("groups/in_flight") == 0 and record.get("timing_s/generate")
    ]
    return Rates(
        generate=saturated[-1],
        update=_sum(steps, "tokens/trained") / busy,
        sync_seconds=median(record.get("timing_s/publish", 0.0) for record in steps),
        length=whole / rollouts,
        kept_length=_sum(steps, "tokens/trained") / trained,
        drain=max(0.0, median(drains)) if drains else 0.0,
    )


def live(values: Mapping[str, float], shape: Shape) -> dict[str, float]:
    """The same of one step while the run goes on: `balance/…`. Empty while a rate is not known.

    Generation is what was really generated for the step: fewer rollouts than n where groups were settled, more where
    some were replaced.
    """
    try:
        rollouts = values.get("rollouts/generated", 0.0) / shape.prompts
        found = stages(rates_of([values]), replace(shape, rollouts=rollouts))
    except (ValueError, ZeroDivisionError):
        return {}
    return {
        "balance/generate_seconds": found.generate,
        "balance/update_seconds": found.update,
        "balance/rollouts_per_prompt": float(found.balanced_rollouts),
        "balance/generators": found.balanced_generators,
    }


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)
