"""Memory of a card that a learner rank shares with generators: the engines' caches beside the learner's peak (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pods_cluster.config import Config

GIB = 2**30
LEFT = 0.1
"""Part of a card that has to be left for CUDA contexts, graphs, logits and fragmentation."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model: `weights` in the run's `model.dtype`, and keys and values of one `token` in an engine's cache."""

    weights: int
    token: int


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of one shared card, in bytes: its size, the rank's peak, and weights and cache of each of its engines.

    `weights` are two sets where a version arrives beside the engine's steps (`weights.staged: true`).

    `cache` holds `sequences` rollouts of `length` tokens (prompt and completion) at full length.
    """

    card: float
    learner: float
    engines: int
    weights: int
    cache: int
    sequences: int
    length: int

    @property
    def left(self) -> float:
        """Bytes that nothing of it takes; below 0 it does not fit."""
        return self.card - self.learner - self.engines * (self.weights + self.cache)

    @property
    def fits(self) -> bool:
        """Whether enough is left for what is not counted."""
        return self.left >= LEFT * self.card

    @property
    def cache_gib(self) -> float:
        """The value of `generator.engine_options.kv_cache_gb`, rounded up to a tenth."""
        return math.ceil(self.cache / GIB * 10 - 1e-9) / 10

    @property
    def sequences_that_fit(self) -> int:
        """Rollouts at full length in each engine for which the card has room; 0: not one."""
        room = (1 - LEFT) * self.card - self.learner - self.engines * self.weights
        return max(0, math.floor(room / self.engines / (self.cache / self.sequences)))

    def describe(self) -> str:
        """Text on what lies on the card, and what to set."""
        engines = "one engine" if self.engines == 1 else f"{self.engines} engines, each"
        text = (
            f"a card of {self.card / 1e9:.0f} GB: the learner's peak {self.learner / 1e9:.1f} GB; {engines} with "
            f"{self.weights / 1e9:.1f} GB of weights and a cache of {self.cache_gib:.1f} GiB ({self.sequences:,} rollouts of "
            f"{self.length:,} tokens); {self.left / 1e9:.1f} GB left for contexts, graphs and logits"
        )
        if self.fits:
            return f"{text}. Set generator.engine_options.kv_cache_gb={self.cache_gib:g}"
        fewer = self.sequences_that_fit
        return f"{text}: that is too little. " + (
            f"Set generator.max_sequences={fewer} or lower learner.tokens_per_microbatch, and plan again"
            if fewer
            else "Lower learner.tokens_per_microbatch, or give the pools a card each"
        )


def card_memory(config: Config, sizes: ModelSizes, *, card: float, learner: float) -> CardMemory | None:
    """The memory of a card of `card` bytes with a rank that takes `learner` bytes; None where pools share no card."""
    share = config.learner.gpus_per_worker or 1.0
    room = math.floor((1 - share) / config.generator.cards + 1e-6)
    engines = min(room, math.ceil(config.generator.workers / config.learner.workers))
    if engines < 1:
        return None
    length = config.data.max_prompt_tokens + config.generator.max_tokens
    sequences = config.generator.max_sequences
    weights = sizes.weights * (2 if config.stages_weights else 1)
    return CardMemory(card, learner, engines, weights, sequences * length * sizes.token, sequences, length)
