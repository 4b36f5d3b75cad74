"""Balance while a run goes on: what its metrics say of it, and n where the run may choose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pods_cluster.config import Config
from pods_cluster.sizing.balance import Shape, live
from pods_cluster.sizing.pace import IDLE, next_rollouts


class Balancer:
    """`rollouts` is the n of the groups issued next."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rollouts = config.generator.rollouts_per_prompt

    def restore(self, rollouts: int) -> None:
        """Go on with the n of a checkpoint, as far as the configuration still allows it."""
        if (bounds := self.config.generator.rollouts_range) is not None:
            self.rollouts = min(bounds[1], max(bounds[0], rollouts))

    def after_step(self, values: Mapping[str, float], *, out: int, ready: int, waited: float) -> dict[str, float]:
        """Metrics of a step with these values.

        `out` groups were out before the step issued more; `ready` were complete when the learner first got some. For
        `waited` seconds it had too few: what it takes to hand over those that are complete is no want of rollouts.
        """
        metrics = {"generator/rollouts_per_prompt": float(self.rollouts)}
        shape = replace(
            Shape.of(self.config),
            generators=max(1, round(values.get("generator/workers", 1.0))),
            ranks=max(1, round(values.get("learner/workers", 1.0))),
        )
        metrics |= live(values, shape)
        step = values.get("timing_s/step", 0.0)
        if self.config.staleness and step > 0:
            metrics["timing_s/wait"] = waited
            if (bounds := self.config.generator.rollouts_range) is not None:
                occupied = values.get("generator/occupied_seconds", step)
                idle = 0 < out <= ready or occupied < (1.0 - IDLE) * step
                self.rollouts = next_rollouts(self.rollouts, *bounds, waited=min(1.0, waited / step), idle=idle)
        return metrics
