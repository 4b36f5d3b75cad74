"""Training of one rank's part of a step: micro-batches through model, loss and engine. Needs no Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from pods_cluster.config import Config
from pods_cluster.learning.deepspeed_engine import TrainingEngine
from pods_cluster.learning.forward import Policy, TokenBatch, TokenPair, adapter_disabled, collate
from pods_cluster.learning.loss import LossSettings, grpo_loss
from pods_cluster.learning.policy_model import load_model, prepare_for_training
from pods_cluster.learning.reports import RankResult
from pods_cluster.learning.step_metrics import TokenStats
from pods_cluster.learning.step_plan import MicroBatch, RankPlan
from pods_cluster.learning.weight_source import AdapterWeights, ModelWeights
from pods_cluster.types import Locator, Rollout


def correction_is_on(config: Config) -> bool:
    """Whether the importance correction applies: `auto` is on wherever engine and learner can differ."""
    mode = config.learner.correction.mode
    if mode != "auto":
        return mode == "on"
    return config.generator.engine == "vllm" or config.model.dtype != "float32" or config.staleness > 0


def loss_settings(config: Config) -> LossSettings:
    """Settings of the objective from the configuration."""
    learner = config.learner
    return LossSettings(
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        correction=correction_is_on(config),
        correction_cap=learner.correction.cap,
        correction_mask=learner.correction.mask,
        kl_coefficient=learner.kl.coefficient,
    )


class Trainer:
    """Policy, DeepSpeed engine and reference model of one rank.

    `model_weights` are all parameters of the policy, `sent_weights` those that go to the generators: the same, or the
    adapter alone. The process group must exist already (`process_group.join`).
    """

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self.config = config
        self.rank = rank
        self.settings = loss_settings(config)
        self.temperature = config.generator.temperature
        torch.manual_seed(config.run.seed)  # adapters start from random numbers: the same on every rank
        policy = Policy(prepare_for_training(load_model(config.model), config.learner))
        self.chunked_head = policy.enable_chunked_head()
        self.parameters = sum(p.numel() for p in policy.parameters())
        self.trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self.engine = TrainingEngine(policy, config.learner, world_size=world_size, seed=config.run.seed)
        stage = config.learner.zero_stage
        self.model_weights = ModelWeights(policy.model, rank, zero_stage=stage)
        self.sent_weights = (
            AdapterWeights(policy.model, rank, zero_stage=stage) if config.sends_adapter else self.model_weights
        )
        self._reference: Policy | None = None
        self._adapter_is_the_difference = config.learner.lora is not None and config.learner.kl.reference is None
        if config.learner.kl.coefficient > 0 and not self._adapter_is_the_difference:
            self._reference = self._load_reference()

    def _load_reference(self) -> Policy:
        """Load a frozen copy of the reference model, whole on every rank."""
        reference = Policy(load_model(self.config.model, self.config.learner.kl.reference).eval().requires_grad_(False))
        reference.enable_chunked_head()
        return reference.to(self.engine.device)

    def train(self, plan: RankPlan, rollouts: Mapping[Locator, Rollout], learning_rate: float) -> RankResult:
        """Take one optimiser step for each update of the plan. Collective: every rank calls it with its own part.

        Raises ValueError, before any collective, for a rollout whose lengths differ from the plan's.
        """
        started = time.monotonic()
        for sequence in plan.sequences:
            _check_lengths(rollouts[sequence.locator], sequence.prompt_tokens, sequence.completion_tokens)
        result = RankResult(learning_rate=learning_rate)
        old = self._old_log_probs(plan, rollouts)
        for index, update in enumerate(plan.updates):
            for position, microbatch in enumerate(update):
                loss, sums, maxima = self._loss(microbatch, rollouts, old.get((index, position)))
                self.engine.backward(loss, last=position == len(update) - 1)
                result.stats.add(_to_host(sums, maxima))
                result.microbatches += 1
                result.padded_tokens += microbatch.padded_tokens
                result.real_tokens += sum(sequence.total_tokens for sequence in microbatch.sequences)
                result.largest_microbatch = max(result.largest_microbatch, microbatch.padded_tokens)
            result.grad_norms.append(self.engine.step(learning_rate))
        result.seconds = time.monotonic() - started
        return result

    def _old_log_probs(
        self, plan: RankPlan, rollouts: Mapping[Locator, Rollout]
    ) -> dict[tuple[int, int], Float32[Tensor, " tokens"]]:
        """Log-probabilities under pi_old by (update, micro-batch), for the updates after the first.

        They are computed before the first update changes the weights; that one needs none, as its ratio is 1.
        """
        old: dict[tuple[int, int], Float32[Tensor, " tokens"]] = {}
        for index, update in enumerate(plan.updates[1:], start=1):
            for position, microbatch in enumerate(update):
                batch = collate(_pairs(microbatch, rollouts), self.engine.device)
                old[index, position] = self.engine.log_probs(batch, self.temperature)
        return old

    def _loss(
        self, microbatch: MicroBatch, rollouts: Mapping[Locator, Rollout], old: Float32[Tensor, " tokens"] | None
    ) -> tuple[Float32[Tensor, ""], dict[str, Float32[Tensor, ""]], dict[str, Float32[Tensor, ""]]]:
        """Loss of a micro-batch, and the sums and maxima of its `TokenStats`."""
        device = self.engine.device
        batch = collate(_pairs(microbatch, rollouts), device)
        per_sequence = torch.tensor(
            [(sequence.advantage, sequence.token_weight) for sequence in microbatch.sequences] or [(0.0, 0.0)],
            dtype=torch.float32,
        ).to(device)
        per_token = per_sequence[batch.rows]
        reference = self._reference_log_probs(batch)
        log_probs, entropy = self.engine.forward(batch, self.temperature)
        loss, sums, maxima = grpo_loss(
            log_probs,
            old,
            _engine_log_probs(microbatch, rollouts).to(device),
            reference,
            per_token[:, 0],
            per_token[:, 1],
            self.settings,
        )
        sums["entropy"] = entropy.sum()
        return loss, sums, maxima

    def _reference_log_probs(self, batch: TokenBatch) -> Float32[Tensor, " tokens"] | None:
        if self.settings.kl_coefficient == 0:
            return None
        if self._reference is not None:
            with torch.no_grad():
                return self._reference(batch.input_ids, batch.positions, batch.targets, self.temperature)[0]
        with adapter_disabled(self.engine.policy.model):
            return self.engine.log_probs(batch, self.temperature)

    def score(self, sequences: Sequence[TokenPair], temperature: float) -> list[list[float]]:
        """Log-probabilities of each sequence's completion under the current weights. Collective under ZeRO-3."""
        budget = self.config.learner.tokens_per_microbatch
        scored: list[list[float]] = []
        start = 0
        while start < len(sequences):
            longest, stop = 0, start
            while stop < len(sequences):
                longest = max(longest, len(sequences[stop][0]) + len(sequences[stop][1]))
                if stop > start and longest * (stop + 1 - start) > budget:
                    break
                stop += 1
            part = sequences[start:stop]
            flat = self.engine.log_probs(collate(part, self.engine.device), temperature).tolist()
            for _, completion in part:
                scored.append(flat[: len(completion)])
                del flat[: len(completion)]
            start = stop
        return scored

    def peak_bytes(self) -> int:
        """Peak memory of this process in bytes: allocated on the GPU, or resident on a CPU."""
        if self.engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _pairs(microbatch: MicroBatch, rollouts: Mapping[Locator, Rollout]) -> list[TokenPair]:
    held = [rollouts[sequence.locator] for sequence in microbatch.sequences]
    return [(rollout.prompt_ids, rollout.token_ids) for rollout in held]


def _engine_log_probs(microbatch: MicroBatch, rollouts: Mapping[Locator, Rollout]) -> Float32[Tensor, " tokens"]:
    """Log-probabilities of the sampled tokens by the engine, NaN where it gave none."""
    values: list[float] = []
    for sequence in microbatch.sequences:
        rollout = rollouts[sequence.locator]
        values += rollout.logprobs if rollout.logprobs is not None else [math.nan] * len(rollout.token_ids)
    return torch.tensor(values, dtype=torch.float32)


def _check_lengths(rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
    if (len(rollout.prompt_ids), len(rollout.token_ids)) != (prompt_tokens, completion_tokens):
        raise ValueError(
            f"rollout {rollout.key} has {len(rollout.prompt_ids)} prompt and {len(rollout.token_ids)} completion "
            f"tokens, its worker reported {prompt_tokens} and {completion_tokens}"
        )
    if rollout.logprobs is not None and len(rollout.logprobs) != len(rollout.token_ids):
        raise ValueError(
            f"rollout {rollout.key} has {len(rollout.logprobs)} log-probabilities for {len(rollout.token_ids)} tokens"
        )


def _to_host(sums: dict[str, Float32[Tensor, ""]], maxima: dict[str, Float32[Tensor, ""]]) -> TokenStats:
    """Read all scalars with one transfer from the device."""
    values = torch.stack([value.detach().float() for value in (*sums.values(), *maxima.values())]).tolist()
    return TokenStats(
        dict(zip(sums, values[: len(sums)], strict=True)), dict(zip(maxima, values[len(sums) :], strict=True))
    )
