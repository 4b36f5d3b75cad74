"""Learner states that change their number of ranks (see pair.py and test_resharding.py).

The pair of ranks goes on with what one rank saved under FOLDER/grown and saves, under FOLDER/shrunk, what one rank
goes on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pods_cluster.config import Config
from pods_cluster.learning import rank_checkpoint
from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.trainer import Trainer
from tests.learning.support import config_for, make_step

RATES = [1e-2, 3e-3, 8e-3, 5e-3]
HALF = 2
LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0}
# name: learner settings of the first two steps, and what differs in the other two
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": ({"zero_stage": 1}, {}),
    "zero3": ({"zero_stage": 3}, {}),
    "zero2-to-3": ({"zero_stage": 2}, {"zero_stage": 3}),
    "lora-zero3": ({"zero_stage": 3, "lora": LORA}, {}),
    "bf16-zero1": ({"zero_stage": 1, "top": {"model": {"dtype": "bfloat16"}}}, {}),
}


def config_of(case: str, model: Path, ranks: int, half: int) -> Config:
    before, after = CASES[case]
    return config_for(model, workers=ranks, **{**before, **(after if half else {})})


def steps(trainer: Trainer, config: Config, half: int) -> list[float]:
    """Train steps 0 and 1, or 2 and 3; this rank's part of each loss."""
    losses = []
    for step in range(HALF * half, HALF * half + HALF):
        selections, rollouts = make_step(step)
        plan = plan_step(selections, plan_settings(config, packed=trainer.packed))
        losses.append(trainer.train(plan.ranks[trainer.rank], rollouts, RATES[step]).stats.sums["loss"])
    return losses


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    specs = trainer.model_weights.specs()
    tensors = [tensor.clone() for tensor in trainer.model_weights.gather(0, len(specs))]
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=False)}


def first_half(case: str, model: Path, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    config = config_of(case, model, ranks, 0)
    trainer = Trainer(config, rank, ranks)
    losses = steps(trainer, config, 0)
    rank_checkpoint.save(trainer, folder / case, ranks)
    return {"losses": losses, "weights": weights(trainer)}


def second_half(case: str, model: Path, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    config = config_of(case, model, ranks, 1)
    trainer = Trainer(config, rank, ranks)
    rank_checkpoint.load(trainer, folder / case, ranks)
    loaded = weights(trainer)
    rank_checkpoint.save(trainer, folder / f"{case}-again", ranks)
    losses = steps(trainer, config, 1)
    return {"losses": losses, "loaded": loaded, "weights": weights(trainer)}


def found_by(rank: int, model: Path, folder: Path) -> dict[str, Any]:
    return {
        "grown": {case: second_half(case, model, folder / "grown", rank, 2) for case in CASES},
        "shrunk": {case: first_half(case, model, folder / "shrunk", rank, 2) for case in CASES},
    }
