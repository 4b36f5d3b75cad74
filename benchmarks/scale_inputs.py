"""What the model of `scale_model.py` is given, and what comes out: speeds, costs, a run, lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds of one token of every rollout in flight: `base` + `per_rollout` x rollouts, at least `least`."""

    base: float
    per_rollout: float
    slots: int
    least: float = 0.0

    def step_seconds(self, running: int) -> float:
        """Seconds in which each of `running` rollouts makes one token."""
        return max(self.least, self.base + self.per_rollout * running)

    @property
    def full_rate(self) -> float:
        """Tokens a second of a full engine."""
        return self.slots / self.step_seconds(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Times of the service's parts, in seconds; the default of 0 is a part that costs nothing.

    `update(rollouts, tokens)` is what the learner group takes for a step, `publish` a new version, of which every engine
    stands still for `pause` and then computes the keys and values of its rollouts in flight anew, `recompute` tokens a
    second; engines on the learner's card keep `share` of their speed while it updates. The selector
    serves one message at a time (`selector_message`, and `selector_group` for each group in it) in each of its
    `selectors`; the controller one group at a time (`controller_group`) in each of its `controllers`, and calls each
    generator `calls_per_step` times a step at `controller_call`. A step costs its plan `plan_rollout` for each kept
    rollout. Ranks take kept rollouts at the same time: `fetch_call` for each worker that a rank asks, `fetch_rollout`
    for each rollout, and the bytes over a link of `link` bytes a second.
    """

    update: Callable[[int, float], float]
    publish: float = 0.0
    pause: float = 0.0
    recompute: float = math.inf
    share: float = 1.0
    ranks: int = 1
    selector_message: float = 0.0
    selector_group: float = 0.0
    selectors: int = 1
    controller_group: float = 0.0
    controller_call: float = 0.0
    calls_per_step: int = 2
    controllers: int = 1
    plan_rollout: float = 0.0
    fetch_call: float = 0.0
    fetch_rollout: float = 0.0
    bytes_per_token: float = 12.0
    link: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run: its pools, its groups and its lengths. `no_signal` of the groups are replaced; `bundle` rollouts of a group
    end at the same time, each after a prompt of `prompt_tokens`, and what happens within `grain` times the service's own
    pauses happens together (1 and 1: as it is; more makes large pools quick to model). With `batches` groups go out as they
    did before the service followed the engines' room: all that the bound of staleness allows at the start of a step, and
    nothing while the learner trains."""

    generators: int
    prompts: int
    n: int
    m: int
    staleness: int
    lengths: Callable[[np.random.Generator, int], np.ndarray]
    no_signal: float = 0.0
    prompt_tokens: float = 0.0
    steps: int = 30
    bundle: int = 1
    grain: float = 1.0
    batches: bool = False
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Numbers of a modelled run, over all steps but the first `SKIP`: seconds a step, tokens made and rollouts trained a
    second, and the share of the time in which each part was at work."""

    seconds_per_step: float
    tokens_per_second: float
    trained_per_second: float
    busy: dict[str, float] = field(default_factory=dict)


def uniform(low: int, high: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Lengths low … high, all as likely."""
    return lambda random, count: random.integers(low, high + 1, count).astype(float)


def lognormal(mean: float, sigma: float, longest: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Log-normal lengths with this mean (before the cut at `longest`)."""
    middle = math.log(mean) - sigma**2 / 2
    return lambda random, count: np.clip(random.lognormal(middle, sigma, count), 1, longest)
