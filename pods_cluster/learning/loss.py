"""The GRPO-PODS objective of one micro-batch (arXiv 2504.13818, eq. 1 and section 3), and what is measured beside it.

Three policies: mu, the engine that sampled; pi_old, the learner at the start of the step; pi_theta, the learner now.
The clipped ratio is pi_theta / pi_old. mu enters through one detached factor min(pi_old / mu, C) a token and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_LIMIT = 20.0
"""Differences of log-probabilities are cut here before exp: e^20 is far beyond any clip or cap, and finite."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """`correction_mask`: tokens whose factor pi_old / mu lies outside [lowest, highest] leave the loss (IcePop)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: bool = False
    correction_cap: float = 2.0
    correction_mask: tuple[float, float] | None = None
    kl_coefficient: float = 0.0


@dataclass(slots=True)
class Sums:
    """What is measured over tokens, as sums, counts and maxima, so that parts of a batch add up exactly."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    engine_log_probs: Tensor | None,
    reference_log_probs: Tensor | None,
    advantages: Tensor,
    token_weights: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss of a micro-batch: the sum over its tokens of token_weight x term. All arguments are float32 [N], one a
    token.

    `old_log_probs` None means pi_old = pi_theta (the only optimiser step of a batch): the ratio is 1 in value and
    carries the gradient. `engine_log_probs` may hold NaN where the engine gave none; such a token has factor 1.

    Returns the loss (a scalar, with gradient), sums and maxima for `Sums` (scalars on the device, detached).
    """
    current = log_probs.detach()
    old = current if old_log_probs is None else old_log_probs
    ratio = torch.exp((log_probs - old).clamp(-LOG_LIMIT, LOG_LIMIT))
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)

    value = ratio.detach()
    sums: dict[str, Tensor] = {"tokens": value.new_tensor(float(len(value))), "ratio": value.sum()}
    sums["clipped_low"] = ((value < 1.0 - settings.clip_low) & (advantages < 0)).float().sum()
    sums["clipped_high"] = ((value > 1.0 + settings.clip_high) & (advantages > 0)).float().sum()
    maxima: dict[str, Tensor] = {}
    if len(value):
        maxima["clipped_low_negated"] = -sums["clipped_low"] / len(value)
        maxima["clipped_high"] = sums["clipped_high"] / len(value)

    if engine_log_probs is not None and len(value):
        known = torch.isfinite(engine_log_probs)
        gap = torch.where(known, old - engine_log_probs, 0.0).clamp(-LOG_LIMIT, LOG_LIMIT)
        factor = torch.exp(gap)
        sums["mismatch_tokens"] = known.float().sum()
        sums["mismatch_abs"] = gap.abs().sum()
        sums["mismatch_k3"] = (torch.expm1(gap) - gap).sum()
        sums["factor"] = torch.where(known, factor, 0.0).sum()
        maxima["mismatch_max"] = gap.abs().max()
        maxima["factor"] = factor.max()
        maxima["factor_negated"] = -factor.min()
        if settings.correction:
            used = factor.clamp(max=settings.correction_cap)
            sums["capped"] = (factor > settings.correction_cap).float().sum()
            if settings.correction_mask is not None:
                low, high = settings.correction_mask
                outside = (factor < low) | (factor > high)
                used = torch.where(outside, 0.0, used)
                sums["masked"] = outside.float().sum()
            sums["used"] = used.sum()
            sums["used_squared"] = used.square().sum()
            objective = objective * used

    loss = -(token_weights * objective).sum()
    if reference_log_probs is not None:
        gap = (reference_log_probs - log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)
        kl = torch.expm1(gap) - gap  # k3: unbiased, never negative
        sums["kl"] = kl.detach().sum()
        loss = loss + settings.kl_coefficient * (token_weights * kl).sum()
    sums["loss"] = loss.detach()
    return loss, sums, maxima


def summarise(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums over all ranks and micro-batches. Shares and means are over trained tokens."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    updates = max(sums.get("updates", 1.0), 1.0)
    metrics = {
        "loss": sums.get("loss", 0.0) / updates,
        "entropy": sums.get("entropy", 0.0) / tokens,
        "ratio_mean": sums.get("ratio", 0.0) / tokens,
        "clip_ratio/low_mean": sums.get("clipped_low", 0.0) / tokens,
        "clip_ratio/low_min": -maxima.get("clipped_low_negated", 0.0),
        "clip_ratio/high_mean": sums.get("clipped_high", 0.0) / tokens,
        "clip_ratio/high_max": maxima.get("clipped_high", 0.0),
    }
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / tokens
    known = sums.get("mismatch_tokens", 0.0)
    if known:
        metrics["sampling/sampling_logp_difference/mean"] = sums["mismatch_abs"] / known
        metrics["sampling/sampling_logp_difference/max"] = maxima["mismatch_max"]
        metrics["mismatch_kl"] = sums["mismatch_k3"] / known
        metrics["sampling/importance_sampling_ratio/min"] = -maxima["factor_negated"]
        metrics["sampling/importance_sampling_ratio/mean"] = sums["factor"] / known
        metrics["sampling/importance_sampling_ratio/max"] = maxima["factor"]
    if sums.get("used_squared"):
        metrics["sampling/effective_sample_size"] = sums["used"] ** 2 / (tokens * sums["used_squared"])
        metrics["sampling/capped_ratio"] = sums.get("capped", 0.0) / tokens
        metrics["sampling/masked_ratio"] = sums.get("masked", 0.0) / tokens
    return metrics
