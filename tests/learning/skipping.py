"""Steps that must be skipped, between steps that must not, on any number of ranks (for test_skipping.py, see pair.py)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pods_cluster.learning.reports import RankResult
from pods_cluster.learning.step_plan import plan_settings, plan_step
from pods_cluster.learning.trainer import Trainer
from tests.learning.support import config_for, make_step

RATE = 1e-2
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2, "tokens_per_microbatch": 40},
    "zero3": {"zero_stage": 3},
    "zero2-lora": {"zero_stage": 2, **LORA},
    "zero3-lora": {"zero_stage": 3, **LORA},
    "zero3-unclipped": {"zero_stage": 3, "max_grad_norm": 0.0},
}
ONE_RANK = ("zero2-lora", "zero3-unclipped")  # bfloat16 is in test_trainer.py
TWO_RANKS = ("zero1", "zero2", "zero3", "zero3-lora")
INFINITE = 1e300
"""A reward with which the loss, in float32, is infinite."""


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    specs = trainer.model_weights.specs()
    gathered = trainer.model_weights.gather(0, len(specs))
    return {spec.name: tensor.clone() for spec, tensor in zip(specs, gathered, strict=False)}


def skips(case: str, model: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Train a good step, one with an infinite loss in one rollout, one with an infinite gradient on the last rank, and a
    good one.
    """
    config = config_for(model, workers=ranks, **CASES[case])
    trainer = Trainer(config, rank, ranks)
    settings = plan_settings(config, ranks, packed=trainer.packed)
    weights: list[dict[str, Tensor]] = []
    results: list[RankResult] = []
    trained = next(parameter for parameter in trainer.engine.policy.parameters() if parameter.requires_grad)
    for seed, bad in enumerate((None, "loss", "gradient", None)):
        selections, rollouts = make_step(seed)
        if bad == "loss":
            selections[1].rewards[:] = 0.0
            selections[1].rewards[0] = INFINITE
        plan = plan_step(selections, replace(settings, normalize=bad is None))
        weights.append(weights_of(trainer))
        with contextlib.ExitStack() as spoiled:
            if bad == "gradient" and rank == ranks - 1:
                spoiled.callback(trained.register_hook(lambda gradient: gradient * torch.inf).remove)
            results.append(trainer.train(plan.ranks[rank], rollouts, RATE))
    weights.append(weights_of(trainer))
    return {"weights": weights, "results": results}


def found_by(rank: int, model: Path) -> dict[str, Any]:
    return {case: skips(case, model, rank, 2) for case in TWO_RANKS}
