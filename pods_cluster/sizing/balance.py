"""Balance of the two pools: the seconds of a step from the rates of its stages, and the n that keeps both busy (pure).

A step generates P x n rollouts and trains P x m of them. With staleness 0 the stages take turns; above, generation and
update overlap and the slower one sets the pace. Publishing new weights holds up both pools either way.

A batch takes longer than its tokens at the full rate, because its longest rollouts end alone (it drains). With
staleness k there are k + 1 batches in flight, so a step also takes at least the latency of one batch through
generation, update and publish, divided by k + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from pods_cluster.config import Config
from pods_cluster.sizing.step_measurement import StepMeasurement

TOLERATED_WAIT = 0.05
"""Share of a step that the learner may wait before n shrinks."""
TOLERATED_IDLE = 0.05
"""Share of a step that the generators may have nothing to do before n grows."""
GROWTH = 1.125
COUNTED_WAIT = 0.5
"""Largest waited share that counts at once: one slow step is no trend."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the stages, measured or given.

    `generate` and `update` are completion tokens a second of one saturated generator worker and of one learner rank
    (fetching included); `sync_seconds` is one publish; `length` and `kept_length` are mean completion tokens of all and
    of kept rollouts; `drain` is the seconds that a batch drains. Raises ValueError naming the option of `pods plan` for
    a rate that is not above 0, or seconds below 0.
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
class StepShape:
    """The size of a step (P, n, m, k) and of the pools: generator workers of `gpus_per_worker` cards each, learner ranks
    of `gpus_per_rank` (below 1: generators may have the rest of the card)."""

    prompts: int
    rollouts: float
    keep: int
    staleness: int
    generators: int
    ranks: int
    gpus_per_worker: float = 1.0
    gpus_per_rank: float = 1.0

    @classmethod
    def of(cls, config: Config) -> StepShape:
        """The shape that a configuration asks for."""
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


@dataclass(frozen=True, slots=True)
class StepForecast:
    """Forecast of one step: seconds by stage and in all, and the share of it in which each pool has nothing to do.

    A batch takes `drain` seconds on top of `generate`. `balanced_rollouts` is the n (not below m) at which generating
    takes as long as updating; `balanced_generators` is the number of workers (a fraction) at which it does.
    """

    shape: StepShape
    generate: float
    update: float
    sync: float
    drain: float
    balanced_rollouts: int
    balanced_generators: float

    @property
    def bottleneck_seconds(self) -> float:
        """Seconds of a step of the slower pool when it never waits."""
        return max(self.generate, self.update) + self.sync

    @property
    def batch_latency(self) -> float:
        """Seconds of one batch from its first token to the weights that it made."""
        return self.generate + self.drain + self.update + self.sync

    @property
    def step(self) -> float:
        """Seconds of the step."""
        k = self.shape.staleness
        return max(self.bottleneck_seconds, self.batch_latency / (k + 1)) if k else self.batch_latency

    @property
    def generator_idle(self) -> float:
        """Share of the step in which the generators have nothing to do."""
        return 1.0 - self.generate / self.step

    @property
    def learner_idle(self) -> float:
        """Share of the step in which the learner has nothing to do."""
        return 1.0 - self.update / self.step

    @property
    def bound(self) -> str:
        """The limit of the pace: `turns` (staleness 0), `staleness`, `generators` or `learner`."""
        if not self.shape.staleness:
            return "turns"
        if self.enough_staleness > self.shape.staleness:
            return "staleness"
        return "generators" if self.generate > self.update else "learner"

    @property
    def enough_staleness(self) -> int:
        """The least staleness with which the slower pool never waits for a batch to drain."""
        return max(1, math.ceil(self.batch_latency / self.bottleneck_seconds * (1 - 1e-9)) - 1)


def forecast(rates: Rates, shape: StepShape) -> StepForecast:
    """The step that a shape takes at these rates."""
    each = shape.prompts * rates.length / (shape.generators * rates.generate)  # seconds for one more rollout a prompt
    generate = each * shape.rollouts
    update = shape.prompts * shape.keep * rates.kept_length / (shape.ranks * rates.update)
    return StepForecast(
        shape=shape,
        generate=generate,
        update=update,
        sync=rates.sync_seconds,
        drain=rates.drain,
        balanced_rollouts=max(shape.keep, round(update / each)),
        balanced_generators=shape.generators * generate / update,
    )


def measured_rates(measured: Sequence[StepMeasurement]) -> Rates:
    """The rates of a run from its steps; the first one, in which everything starts, is left out where others are there.

    Raises ValueError when the steps do not hold what is needed.
    """
    steps = [step for step in measured if step.trained_tokens and step.update_seconds]
    steps = steps[1:] or steps
    if not steps:
        raise ValueError("metrics.jsonl: holds no step that trained something; let the run make some steps first")
    saturated = [step.saturated_rate / step.generators for step in steps if step.saturated_rate]
    rollouts, trained = sum(step.generated_rollouts for step in steps), sum(step.trained_rollouts for step in steps)
    if not saturated or not rollouts or not trained:
        raise ValueError(
            "metrics.jsonl: holds no rate of a generator that was busy for a whole second; use longer steps, or give "
            "--generate-rate, --update-rate, --sync-seconds and --length"
        )
    trained_tokens = sum(step.trained_tokens for step in steps)
    # Where no group is in flight after a step, its generation was that of its own batch alone.
    drains = [
        step.generate_seconds - step.sampled_tokens / (saturated[-1] * step.generators)
        for step in steps
        if step.groups_in_flight == 0 and step.generate_seconds
    ]
    return Rates(
        generate=saturated[-1],
        update=trained_tokens / sum((step.update_seconds + step.fetch_seconds) * step.ranks for step in steps),
        sync_seconds=median(step.publish_seconds for step in steps),
        length=sum(step.sampled_tokens - step.aborted_tokens for step in steps) / rollouts,
        kept_length=trained_tokens / trained,
        drain=max(0.0, median(drains)) if drains else 0.0,
    )


def balance_metrics(step: StepMeasurement, shape: StepShape) -> dict[str, float]:
    """The metrics `balance/…` of a step with its rates; empty while a rate is not known.

    Generation is what was really generated for the step: fewer rollouts than n where groups were settled, more where
    some were replaced.
    """
    try:
        found = forecast(measured_rates([step]), replace(shape, rollouts=step.generated_rollouts / shape.prompts))
    except (ValueError, ZeroDivisionError):
        return {}
    return {
        "balance/generate_seconds": found.generate,
        "balance/update_seconds": found.update,
        "balance/rollouts_per_prompt": float(found.balanced_rollouts),
        "balance/generators": found.balanced_generators,
    }


def next_rollouts(n: int, low: int, high: int, *, waited: float, idle: bool) -> int:
    """The n of the groups issued next, in `low` … `high`, for `rollouts_per_prompt: auto`.

    `waited` is the share of the step in which the learner waited for groups: generating takes 1 / (1 - waited) times as
    long as the rest, so n goes half-way to where both take as long. With `idle` (the learner hardly waited, and the
    generators had nothing to do for a part of the step) it grows by an eighth.
    """
    if waited > TOLERATED_WAIT:
        wanted = n * (1.0 - min(waited, COUNTED_WAIT) / 2)
        return min(high, max(low, min(n - 1, round(wanted))))
    if idle:
        return max(low, min(high, max(n + 1, round(n * GROWTH))))
    return min(high, max(low, n))


class Balancer:
    """Balance of a live run: its metrics, and n where the run may choose it.

    `rollouts` is the n of the groups issued next.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rollouts = config.generator.rollouts_per_prompt

    def restore(self, rollouts: int) -> None:
        """Go on with the n of a checkpoint, as far as the configuration still allows it."""
        if (bounds := self.config.generator.rollouts_range) is not None:
            self.rollouts = min(bounds[1], max(bounds[0], rollouts))

    def after_step(self, step: StepMeasurement, *, in_flight: int, ready: int, waited: float) -> dict[str, float]:
        """Choose the next n; returns the step's metrics.

        `in_flight` groups were so before the step issued more; `ready` were complete when the learner first got some.
        For `waited` seconds it had too few: the time that it takes to receive complete groups does not count, because
        it is no lack of rollouts.
        """
        metrics = {"generator/rollouts_per_prompt": float(self.rollouts)}
        shape = replace(StepShape.of(self.config), generators=max(1, step.generators), ranks=max(1, step.ranks))
        metrics |= balance_metrics(step, shape)
        if self.config.staleness and step.seconds > 0:
            metrics["timing_s/wait"] = waited
            if (bounds := self.config.generator.rollouts_range) is not None:
                occupied = step.seconds if step.occupied_seconds is None else step.occupied_seconds
                idle = 0 < in_flight <= ready or occupied < (1.0 - TOLERATED_IDLE) * step.seconds
                self.rollouts = next_rollouts(self.rollouts, *bounds, waited=min(1.0, waited / step.seconds), idle=idle)
        return metrics
