"""What a configuration comes to before anything runs: pools, rollouts a step, asymmetry (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from pods_cluster.config import Config


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one optimiser step and of the whole run, in rollouts and tokens (upper bounds where lengths count)."""

    groups: int
    generated: int
    trained: int
    total_generated: int
    total_trained: int
    sequences_per_rank: tuple[int, int]
    microbatches_at_most: int
    out_at_most: int

    @property
    def asymmetry(self) -> float:
        """Rollouts generated for each one trained, before replacements: n / m."""
        return self.generated / self.trained


def plan_of(config: Config) -> Plan:
    """The plan of a configuration."""
    groups, trained = config.learner.prompts_per_step, config.trained_per_step
    ranks = config.learner.workers
    longest = config.data.max_prompt_tokens + config.generator.max_tokens
    per_microbatch = max(1, config.learner.tokens_per_microbatch // longest)
    most = -(-trained // ranks)
    return Plan(
        groups=groups,
        generated=config.rollouts_per_step,
        trained=trained,
        total_generated=config.rollouts_per_step * config.run.steps,
        total_trained=trained * config.run.steps,
        sequences_per_rank=(trained // ranks, most),
        microbatches_at_most=-(-most // per_microbatch),
        out_at_most=(config.staleness + 1) * groups,
    )
