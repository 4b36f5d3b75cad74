"""Tensors of a micro-batch: its tokens, and what the loss needs of each beside the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pods_cluster.learning.microbatches import MicroBatch, PlannedSequence
from pods_cluster.learning.token_batch import TokenBatch, move_together, pack, pad
from pods_cluster.types import Locator, Rollout


@dataclass(slots=True)
class LossInputs:
    """Tensors of a micro-batch: its tokens, and for each trained token what the loss needs beside the model."""

    batch: TokenBatch
    advantages: Float32[Tensor, " tokens"]
    token_weights: Float32[Tensor, " tokens"]
    engine_log_probs: Float32[Tensor, " tokens"]

    def to(self, device: torch.device) -> LossInputs:
        return LossInputs(
            self.batch.to(device),
            *move_together([self.advantages, self.token_weights, self.engine_log_probs], device),
        )


def loss_inputs(microbatch: MicroBatch, rollouts: Mapping[Locator, Rollout]) -> LossInputs:
    """Lay a micro-batch out on the host. Log-probabilities that the engine did not give are NaN.

    Tokens that an environment wrote are read by the model and are no targets: nothing is computed for them, so that no
    term of the loss and no statistic can depend on what would be predicted in their place.
    """
    held = [rollouts[sequence.locator] for sequence in microbatch.sequences]
    pairs = [(rollout.prompt_ids, rollout.token_ids) for rollout in held]
    lengths = [len(rollout.token_ids) for rollout in held]
    engine = np.full(sum(lengths), math.nan, np.float32)
    end = 0
    for rollout, length in zip(held, lengths, strict=True):
        if rollout.logprobs is not None:
            engine[end : end + length] = rollout.logprobs
        end += length
    values = np.array([(s.advantage, s.token_weight) for s in microbatch.sequences], np.float32).reshape(-1, 2)
    per_token = np.repeat(values, lengths, axis=0)
    batch = pack(pairs) if microbatch.packed else pad(pairs)
    if any(rollout.environment for rollout in held):
        sampled = np.concatenate([rollout.sampled() for rollout in held])
        batch, per_token, engine = batch.only(torch.from_numpy(sampled)), per_token[sampled], engine[sampled]
    return LossInputs(
        batch,
        torch.from_numpy(per_token[:, 0].copy()),
        torch.from_numpy(per_token[:, 1].copy()),
        torch.from_numpy(engine),
    )


def check_lengths(rollout: Rollout, planned: PlannedSequence) -> None:
    """Raise ValueError for a rollout whose lengths are not those that its worker reported."""
    found = (len(rollout.prompt_ids), len(rollout.token_ids), rollout.environment_tokens)
    if found != (planned.prompt_tokens, planned.completion_tokens, planned.environment_tokens):
        raise ValueError(
            f"rollout {rollout.key} has {found[0]} prompt and {found[1]} completion tokens ({found[2]} of them an "
            f"environment's), its worker reported {planned.prompt_tokens} and {planned.completion_tokens} "
            f"({planned.environment_tokens})"
        )
    if rollout.logprobs is not None and len(rollout.logprobs) != len(rollout.token_ids):
        raise ValueError(
            f"rollout {rollout.key} has {len(rollout.logprobs)} log-probabilities for {len(rollout.token_ids)} tokens"
        )
