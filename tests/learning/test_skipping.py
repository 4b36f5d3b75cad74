"""A step whose loss or gradient is not finite is skipped by all ranks alike, and leaves no trace in the training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.learning.skipping import CASES, ONE_RANK, RATE, TWO_RANKS, skips
from tests.learning.support import OneBigBatch, config_for, make_step
from tests.learning.test_trainer import assert_same_parameters


def assert_skipped(found: dict[str, Any]) -> None:
    """The second and the third of four steps were skipped: not one bit of the weights is another."""
    start, first, second, third, end = found["weights"]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, third[name]), name
        assert torch.isfinite(end[name]).all(), name
    if start:  # rank 0 alone is handed the weights
        assert any(not torch.equal(start[name], first[name]) for name in start)
        assert any(not torch.equal(third[name], end[name]) for name in start)
    results = found["results"]
    assert [len(result.skipped) for result in results] == [0, 1, 1, 0]
    assert [len(result.grad_norms) for result in results] == [1, 0, 0, 1]
    for result in results:
        assert all(math.isfinite(value) for value in [*result.stats.sums.values(), *result.grad_norms])
        assert bool(result.stats.sums) is not bool(result.skipped)


def assert_never_trained(found: dict[str, Any], model: Path, case: str) -> None:
    """The last step is that of a training which never had the two: the optimiser was left alone too."""
    config = config_for(model, **CASES[case])
    truth = OneBigBatch(config, AutoModelForCausalLM.from_pretrained(model))
    for seed in (0, 3):
        selections, rollouts = make_step(seed)
        truth.step(selections, rollouts, RATE)
    assert_same_parameters(found["weights"][-1], truth.parameters())


@pytest.mark.parametrize("case", ONE_RANK)
def test_one_rank(one_rank: None, model_folder: Path, case: str) -> None:
    found = skips(case, model_folder, 0, 1)
    assert_skipped(found)
    loss, gradient = (found["results"][step].skipped[0] for step in (1, 2))
    assert make_step(1)[0][1].group in loss.groups
    assert gradient.groups == ()
    if "lora" not in case:
        assert_never_trained(found, model_folder, case)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_skip_together(two: Any, model_folder: Path, case: str) -> None:
    first, second = (found["skipping"][case] for found in two.found)
    assert_skipped(first)
    assert_skipped(second)
    bad = make_step(1)[0][1].group
    assert bad in {group for rank in (first, second) for group in rank["results"][1].skipped[0].groups}
    if "lora" not in case:
        assert_never_trained(first, model_folder, case)
