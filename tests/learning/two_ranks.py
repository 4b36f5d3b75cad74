"""What each of two learner ranks does for test_two_ranks.py (see pair.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.trainer import Trainer
from tests.learning.support import config_for, make_step

RATES = [1e-2, 3e-3]
# Three rollouts in two updates: in the second one a rank has none. (Over a kept set of one, scope `kept` has no
# signal.)
ONE_HAS_NONE: dict[str, Any] = {"updates_per_batch": 2, "advantage": {"scope": "group"}}
SCENARIOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "zero1": ({"zero_stage": 1, "tokens_per_microbatch": 40}, (4, 4, 3, 4)),
    "zero2": ({"zero_stage": 2, "tokens_per_microbatch": 64, "loss": "token_mean"}, (4, 4, 3, 4)),
    "zero3": ({"zero_stage": 3, "tokens_per_microbatch": 40}, (4, 4, 3, 4)),
    "zero3-updates-kl": (
        {"zero_stage": 3, "updates_per_batch": 2, "kl": {"coefficient": 0.1}, "tokens_per_microbatch": 200},
        (4, 4, 3, 4),
    ),
    "zero1-none": ({"zero_stage": 1, **ONE_HAS_NONE}, (2, 1)),
    "zero2-none": ({"zero_stage": 2, **ONE_HAS_NONE}, (2, 1)),
    "zero3-none": ({"zero_stage": 3, **ONE_HAS_NONE}, (2, 1)),
}


def train(scenario: str, model: Path, rank: int, ranks: int) -> dict[str, Any]:
    learner, kept = SCENARIOS[scenario]
    config = config_for(model, workers=ranks, **learner)
    trainer = Trainer(config, rank, ranks)
    results = []
    for seed, rate in enumerate(RATES):
        selections, rollouts = make_step(seed, kept)
        plan = plan_step(selections, plan_settings(config, packed=trainer.packed))
        results.append(trainer.train(plan.ranks[rank], rollouts, rate))
    specs = trainer.model_weights.specs()
    middle = len(specs) // 2
    tensors = [tensor.clone() for tensor in trainer.model_weights.gather(0, middle)]
    tensors += [tensor.clone() for tensor in trainer.model_weights.gather(middle, len(specs))]
    return {
        "weights": {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=False)},
        "shapes": {spec.name: spec.shape for spec in specs},
        "norms": [norm for result in results for norm in result.grad_norms],
        "tokens": [result.sequence_tokens for result in results],
        "microbatches": [result.microbatches for result in results],
        "sums": [result.stats.sums for result in results],
        "optimizer_bytes": trainer.engine.optimizer_bytes(),
        "score": trainer.score([((4, 5, 6), (7, 8, 9))], 0.8),
    }


def found_by(rank: int, model: Path) -> dict[str, Any]:
    return {name: train(name, model, rank, 2) for name in SCENARIOS}
