"""Training of one rank's part of a step: micro-batches through model, loss and engine. Needs no Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from jaxtyping import Float32
from torch import Tensor

from pods_cluster.config import Config
from pods_cluster.learning.deepspeed_engine import TrainingEngine
from pods_cluster.learning.forward import Policy, adapter_disabled, log_prob_tolerance, sample_batch, unwrap_peft
from pods_cluster.learning.kernel_choice import apply_kernels, choose_kernels, choose_packing
from pods_cluster.learning.loss import GrpoLoss, LossSettings
from pods_cluster.learning.loss_inputs import LossInputs, check_lengths, loss_inputs
from pods_cluster.learning.microbatches import MicroBatch
from pods_cluster.learning.policy_model import ModelError, load_model, prepare_for_training
from pods_cluster.learning.readings import Reading, groups_without_loss, to_host
from pods_cluster.learning.reports import RankResult, SkippedUpdate
from pods_cluster.learning.step_plan import RankPlan
from pods_cluster.learning.token_batch import TokenBatch, TokenPair, pack, pad
from pods_cluster.learning.weight_source import AdapterWeights, ModelWeights
from pods_cluster.types import Locator, Rollout


def correction_is_on(config: Config) -> bool:
    """Whether the importance correction applies: `auto` is on wherever engine and learner can differ."""
    mode = config.learner.correction.mode
    if mode != "auto":
        return mode == "on"
    generator = config.generator
    return generator.engine == "vllm" or config.model.dtype != "float32" or config.staleness > 0 or bool(generator.cuts)


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
        objective=learner.objective,
        importance=learner.importance,
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
        policy = Policy(
            prepare_for_training(load_model(config.model), config.learner),
            # In float16 the gradients of single tokens are too small before the loss scale is applied. The loss of a token
            # must not hang on those of other chunks.
            fused_loss=config.learner.kernels != "plain"
            and config.model.dtype != "float16"
            and config.learner.importance == "token"
            and not config.learner.entropy_coefficient,
            entropy_gradient=config.learner.entropy_coefficient > 0,
        )
        self.chunked_head = policy.enable_chunked_head()
        self._adapter_is_the_difference = config.learner.lora is not None and config.learner.kl.reference is None
        self._reference: Policy | None = None
        if config.learner.kl.coefficient > 0 and not self._adapter_is_the_difference:
            self._reference = self._load_reference()
        expected = policy.sample_log_probs(packed=False)
        self._choose(policy)
        self.parameters = sum(p.numel() for p in policy.parameters())
        self.trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self.engine = TrainingEngine(policy, config.learner, world_size=world_size, seed=config.run.seed)
        if self._reference is not None:
            self._reference.to(self.engine.device)
        self._check(expected)
        stage = config.learner.zero_stage
        self.model_weights = ModelWeights(policy.model, rank, zero_stage=stage)
        self.sent_weights = (
            AdapterWeights(policy.model, rank, zero_stage=stage) if config.sends_adapter else self.model_weights
        )

    def _choose(self, policy: Policy) -> None:
        """Choose packing and kernels, and note what was chosen and why in `choices`."""
        policies = [policy] if self._reference is None else [policy, self._reference]
        self.packed, why_packing = choose_packing(policies, self.config)
        self.kernels, why_kernels = choose_kernels(policy.model, self.config.learner)
        for each in policies:  # after all comparisons: they run on the CPU, where Liger's kernels do not
            apply_kernels(each.model, self.kernels)
        loss = "in one pass with the loss" if policy.fused_loss and policy.chunked_head else "before the loss"
        self.choices = [
            f"learner.kernels: {self.kernels} ({why_kernels}), the output layer {loss}",
            f"learner.packing: {'on' if self.packed else 'off'} ({why_packing})",
        ]

    def _check(self, expected: Float32[Tensor, " tokens"]) -> None:
        """Compare the engine's log-probabilities of a few sequences with those that the plain model gave on the CPU.

        Raises ModelError if rounding does not explain the difference. Collective.
        """
        if self.engine.device.type == "cpu":
            return
        model = unwrap_peft(self.engine.policy.model)
        batch = sample_batch(cast(Any, model).config.get_text_config().vocab_size, packed=self.packed)
        found = self.engine.log_probs(batch.to(self.engine.device), 1.0).cpu()
        difference = (found - expected).abs().mean().item()
        if not difference < log_prob_tolerance(expected, next(self.engine.policy.parameters()).dtype):
            raise ModelError(
                f"learner.kernels: {self.kernels} with learner.packing: {'on' if self.packed else 'off'} computes other "
                f"log-probabilities than the model's own code (by {difference:.3g} nats a token); "
                f"set learner.kernels: plain and learner.packing: off"
            )

    def _load_reference(self) -> Policy:
        """Load a frozen copy of the reference model, whole on every rank."""
        reference = Policy(load_model(self.config.model, self.config.learner.kl.reference).eval().requires_grad_(False))
        reference.fused_loss = self.config.learner.kernels != "plain"
        reference.enable_chunked_head()
        return reference

    def train(self, plan: RankPlan, rollouts: Mapping[Locator, Rollout], learning_rate: float) -> RankResult:
        """Take one optimiser step for each update of the plan. Collective: every rank calls it with its own part.

        An update whose loss or gradient is not finite is skipped by all ranks, and reported.
        Raises ValueError, before any collective, for a rollout whose lengths differ from the plan's.
        """
        started = time.monotonic()
        for sequence in plan.sequences:
            check_lengths(rollouts[sequence.locator], sequence)
        result = RankResult(learning_rate=learning_rate)
        readings: list[Reading] = []
        old = self._old_log_probs(plan, rollouts)
        for index, update in enumerate(plan.updates):
            taken: list[Reading] = []
            for position, (microbatch, inputs) in enumerate(self._prepare(update, rollouts)):
                loss, reading = self._loss(inputs, old.get((index, position)))
                self.engine.backward(loss, last=position == len(update) - 1)
                taken.append(reading)
                result.count(microbatch)
            norm = self.engine.step(learning_rate)
            if self.engine.applied:
                result.grad_norms.append(norm)
                readings += taken
            else:
                result.skipped.append(SkippedUpdate(index, groups_without_loss(update, taken)))
        result.stats = to_host(readings)
        result.seconds = time.monotonic() - started
        return result

    def _prepare(
        self, update: Sequence[MicroBatch], rollouts: Mapping[Locator, Rollout]
    ) -> Iterator[tuple[MicroBatch, LossInputs]]:
        """The micro-batches with their tensors on the device, each laid out on the host while the one before computes."""
        if self.engine.device.type == "cpu":
            yield from ((microbatch, loss_inputs(microbatch, rollouts)) for microbatch in update)
            return
        with ThreadPoolExecutor(1, "prepare") as host:
            coming = host.submit(loss_inputs, update[0], rollouts)
            for position, microbatch in enumerate(update):
                inputs = coming.result().to(self.engine.device)
                if position + 1 < len(update):
                    coming = host.submit(loss_inputs, update[position + 1], rollouts)
                yield microbatch, inputs

    def _old_log_probs(
        self, plan: RankPlan, rollouts: Mapping[Locator, Rollout]
    ) -> dict[tuple[int, int], Float32[Tensor, " tokens"]]:
        """Log-probabilities under pi_old by (update, micro-batch), for the updates after the first.

        They are computed before the first update changes the weights; that one needs none, as its ratio is 1.
        """
        old: dict[tuple[int, int], Float32[Tensor, " tokens"]] = {}
        for index, update in enumerate(plan.updates[1:], start=1):
            for position, (_, inputs) in enumerate(self._prepare(update, rollouts)):
                old[index, position] = self.engine.log_probs(inputs.batch, self.temperature)
        return old

    def _loss(self, inputs: LossInputs, old: Float32[Tensor, " tokens"] | None) -> tuple[Float32[Tensor, ""], Reading]:
        """Loss of a micro-batch with its gradient, and its statistics on the device."""
        objective = GrpoLoss(
            old,
            inputs.engine_log_probs,
            self._reference_log_probs(inputs.batch),
            inputs.advantages,
            inputs.token_weights,
            self.settings,
            self.engine.log_probs(inputs.batch, self.temperature) if self.engine.dropouts else None,
            inputs.batch.rows,
        )
        log_probs, entropy, loss = self.engine.forward(inputs.batch, self.temperature, objective.token_losses)
        assert loss is not None
        sums, maxima = objective.statistics(log_probs.detach())
        if bonus := self.config.learner.entropy_coefficient:
            gained = bonus * (inputs.token_weights * entropy).sum()
            loss = loss - gained
            sums["loss"] = sums["loss"] - gained.detach()
        return loss, Reading.of({**sums, "entropy": entropy.sum()}, maxima)

    def _reference_log_probs(self, batch: TokenBatch) -> Float32[Tensor, " tokens"] | None:
        if self.settings.kl_coefficient == 0:
            return None
        if self._reference is not None:
            with torch.no_grad():
                return self._reference(batch, self.temperature)[0]
        with adapter_disabled(self.engine.policy.model):
            return self.engine.log_probs(batch, self.temperature)

    def score(self, sequences: Sequence[TokenPair], temperature: float) -> list[list[float]]:
        """Log-probabilities of each sequence's completion under the current weights. Collective under ZeRO-3."""
        scored: list[list[float]] = []
        for part in self._parts(sequences):
            batch = (pack(part) if self.packed else pad(part)).to(self.engine.device)
            flat = self.engine.log_probs(batch, temperature).tolist()
            for _, completion in part:
                scored.append(flat[: len(completion)])
                del flat[: len(completion)]
        return scored

    def _parts(self, sequences: Sequence[TokenPair]) -> Iterator[Sequence[TokenPair]]:
        """Sequences in micro-batches of at most `learner.tokens_per_microbatch` tokens as they are padded."""
        budget = self.config.learner.tokens_per_microbatch
        start = longest = 0
        for stop, (prompt, completion) in enumerate(sequences):
            longest = max(longest, len(prompt) + len(completion))
            if stop > start and longest * (stop + 1 - start) > budget:
                yield sequences[start:stop]
                start, longest = stop, len(prompt) + len(completion)
        if start < len(sequences):
            yield sequences[start:]

    def peak_bytes(self) -> int:
        """Peak memory of this process in bytes: allocated on the GPU, or resident on a CPU."""
        if self.engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
