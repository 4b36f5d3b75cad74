"""The `learner` section: the objective, its optimiser, and the DeepSpeed ranks."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pods_cluster.config.base import LONGEST_WAIT, Section, usable_path
from pods_cluster.config.labels import Labels


class AdvantageConfig(Section):
    """The advantages of rollouts, computed from the rewards of their group."""

    scope: Literal["kept", "group"] = "kept"
    """Mean and deviation over the m kept rollouts (the paper's code) or over all valid rollouts of the group."""
    normalize: bool = True
    """Divide by the sample standard deviation (+ 1e-4); false: only subtract the mean (Dr. GRPO)."""


class KLConfig(Section):
    """A penalty on divergence from a reference model. With coefficient 0 it is off, and no reference model is loaded."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL term (the k3 estimator) in the loss."""
    reference: str | None = Field(default=None, min_length=1)
    """Folder or hub name of the reference model; left out: the model that the run starts from."""

    _paths = field_validator("reference")(usable_path)


class CorrectionConfig(Section):
    """Importance correction of engine against learner probabilities: the factor min(pi_old/mu, cap) for each token,
    without a gradient."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`auto`: on wherever numerics, weight versions or distributions can differ (vLLM, bfloat16, staleness above 0, top_p,
    top_k, min_p)."""
    cap: float = Field(default=2.0, gt=0)
    """C: largest factor."""
    mask: tuple[float, float] | None = None
    """Tokens whose factor is outside [lowest, highest] are left out of the loss (IcePop); null: no token is."""

    @model_validator(mode="after")
    def _mask_holds_one(self) -> CorrectionConfig:
        if self.mask is not None and not 0 <= self.mask[0] < 1 < self.mask[1]:
            raise ValueError(f"mask: {list(self.mask)} must hold 1 inside, as in [0.5, 5.0]")
        return self


class LoraConfig(Section):
    """Low-rank adapters that are trained instead of the whole model."""

    rank: int = Field(default=64, ge=1)
    """r: the rank of the adapters."""
    alpha: float = Field(default=64.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input, in training passes alone: wherever log-probabilities are compared with those of the
    engine or of a reference they are scored without it, by one more pass. Needs `updates_per_batch: 1`."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter, or all linear layers."""
    send: Literal["auto", "adapter", "merged"] = "auto"
    """Weights that are sent to the generators: the `adapter` alone, which they merge into the weights of `model.path`, or the
    whole model with the adapter `merged`. `auto`: the adapter where the engine can take it (not `paced`, and not vLLM
    with `engine_options.transfer: native`)."""

    @field_validator("target_modules")
    @classmethod
    def _layers_are_named(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(value, tuple) and (not value or "" in value):
            raise ValueError(f"{list(value)} names no layer; name some, as in [q_proj, v_proj], or write all-linear")
        return value


class LearnerConfig(Section):
    """The group of DeepSpeed ranks that updates the policy."""

    workers: int = Field(default=1, ge=1)
    """Learner ranks (data parallel)."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO stage."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Groups in one step, which trains on prompts_per_step x m rollouts."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over `run.steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """Warm-up as a share of `run.steps`, in place of `warmup_steps`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay; not applied to norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 turns it off."""
    tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Most computed tokens in a micro-batch (padding included; a prompt once where packing shares it): the memory of a
    rank grows with this, not with n. More is faster as long as it fits; small models want 32,768."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps over one batch; the clip below matters only above 1."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip of the probability ratio: 1 + clip_high."""
    max_skipped: int = Field(default=5, ge=1)
    """Updates in a row whose loss or gradient is not finite: each is skipped, and after so many the run ends and names the
    last checkpoint. Overflows of float16 that only lower the loss scale do not count."""
    loss: Literal["sequence_mean", "token_mean", "dr_grpo"] = "sequence_mean"
    """Average over tokens: in each rollout first (`sequence_mean`, the paper), over all tokens of the step
    (`token_mean`), or a sum divided by `generator.max_tokens` (`dr_grpo`)."""
    objective: Literal["clip", "cispo"] = "clip"
    """`clip`: PPO's, in which a token beyond the clip has no gradient. `cispo` (MiniMax-M1, arXiv 2506.13585): the ratio,
    at most 1 + `clip_high`, is a constant factor of the log-probability, so that every token keeps its gradient."""
    importance: Literal["token", "sequence"] = "token"
    """The probability ratio that is clipped: of each token, or of the whole completion, as its geometric mean over tokens
    (`sequence`: GSPO, arXiv 2507.18071, whose clips are about 3e-4). With one optimiser step a batch both are 1."""
    mask_truncated: bool = False
    """Leave completions that were cut at `generator.max_tokens` out of the loss (overlong filtering of DAPO, arXiv
    2503.14476). They stay in the group that the advantages are computed from."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a bonus on the entropy of the policy at each token, averaged as `loss` says (A3C, arXiv 1602.01783). Above
    0 the output layer and the loss are computed one after the other."""
    advantage: AdvantageConfig = AdvantageConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    lora: LoraConfig | None = None
    kernels: Literal["auto", "liger", "compile", "plain"] = "auto"
    """How the model's layers are computed: by `liger-kernel`'s fused kernels (GPU), compiled one by one by torch (the
    first steps wait for the compiler), or as the model's code says. `auto`: Liger's where they are installed and know the
    model, else plain. The output layer and the loss are computed in one pass but for `plain`, the reference, and
    float16."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Micro-batches without padding, in which the kept rollouts of a group share one copy of their prompt: the same
    gradients from fewer tokens. `auto`: wherever the model's attention allows; `on`: or the run does not start."""
    gradient_checkpointing: bool = False
    """Save memory by computing activations again in the backward pass."""
    offload_optimizer: bool = False
    """Keep optimiser states in host memory (GPUs)."""
    optimizer: Literal["adamw", "adamw_fused", "adamw_8bit"] = "adamw"
    """AdamW in torch (its fused kernel on a GPU, but for offloaded states), its fused kernel everywhere, or with 8-bit
    states (bitsandbytes, GPU)."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """Ray CPUs of one rank."""
    gpus_per_worker: float | None = Field(default=None, ge=0)
    """Ray GPUs of one rank (a fraction shares a card); left out: 1 where the cluster has GPUs, else 0."""
    place: Labels = Field(default_factory=dict)
    """Labels of the Ray nodes that ranks may run on, as `generator.place`. Ranks of a cluster of several nodes are placed
    on as few of them as there is room on."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of one rank on a CPU; left out: `cpus_per_worker` rounded down, at least 1."""
    start_timeout: float = Field(default=900.0, gt=0, le=LONGEST_WAIT)
    """Seconds until ranks that have not started are reported with their cause (DeepSpeed's first start compiles an
    operator)."""
    step_timeout: float = Field(default=1800.0, gt=0, le=LONGEST_WAIT)
    """Seconds after which an update that has not ended is reported as hung."""

    def gpus(self, gpus_in_cluster: float) -> float:
        """Return the Ray GPUs of one rank: `gpus_per_worker`, else one where the cluster has GPUs."""
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return 1.0 if gpus_in_cluster else 0.0

    @property
    def resizable(self) -> bool:
        """Whether the group can change its number of ranks: 8-bit optimiser states come in blocks that cannot be cut
        anywhere, so only the same number of ranks can read them."""
        return self.optimizer != "adamw_8bit"

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of so many steps."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)

    @model_validator(mode="after")
    def _objectives_fit(self) -> LearnerConfig:
        if self.objective == "cispo" and self.importance == "sequence":
            raise ValueError(
                "importance: sequence has no ratio of a token, which objective: cispo bounds; use importance: token, or "
                "objective: clip"
            )
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"warmup_ratio: {self.warmup_ratio:g} and warmup_steps: {self.warmup_steps} say the same; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _kernels_fit(self) -> LearnerConfig:
        if self.kernels == "compile" and self.zero_stage == 3:
            raise ValueError(
                "kernels: compile does not work with zero_stage: 3, which replaces the layers' weights while they compute; "
                "use kernels: auto or zero_stage: 2"
            )
        return self

    @field_validator("betas")
    @classmethod
    def _betas_are_decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"{list(value)} must both lie in [0, 1), as in [0.9, 0.999]")
        return value
