"""The GRPO-PODS objective of one micro-batch (arXiv 2504.13818, eq. 1 and section 3), and statistics beside it.

Three policies: mu, the engine that sampled; pi_old, the learner at the start of the step; pi_theta, the learner now.
An optimiser step minimises, over all tokens t of all kept rollouts i of its groups,

    L(theta) = - sum_i,t  w_i * c_i,t * min( r_i,t * A_i,  clip(r_i,t, 1 - clip_low, 1 + clip_high) * A_i )
               + kl_coefficient * sum_i,t  w_i * ( q_i,t - log q_i,t - 1 )

    r_i,t = pi_theta(o_i,t) / pi_old(o_i,t)            the clipped ratio; the only factor with a gradient
    c_i,t = min( pi_old(o_i,t) / mu(o_i,t), C )        the importance correction: detached, 1 where it is off
    q_i,t = pi_ref(o_i,t) / pi_theta(o_i,t)            k3 estimate of KL(pi_theta || pi_ref), off by default

where each probability is that of the sampled token o_i,t given its prompt and the tokens before it. A_i is the advantage
over the group's kept rollouts (`advantage`), and w_i the token weight (`step_plan`): 1 / (groups * kept * |o_i|) for
`sequence_mean`. mu enters through c alone and is never the denominator of the clipped ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

LOG_LIMIT = 20.0
"""Differences of log-probabilities are cut here before exp: e^20 is far beyond any clip or cap, and finite."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of the objective.

    `correction_cap` is C. With a `correction_mask` (IcePop), tokens whose pi_old / mu lies outside [lowest, highest] leave
    the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: bool = False
    correction_cap: float = 2.0
    correction_mask: tuple[float, float] | None = None
    kl_coefficient: float = 0.0


def grpo_loss(
    log_probs: Float32[Tensor, " tokens"],
    old_log_probs: Float32[Tensor, " tokens"] | None,
    engine_log_probs: Float32[Tensor, " tokens"] | None,
    reference_log_probs: Float32[Tensor, " tokens"] | None,
    advantages: Float32[Tensor, " tokens"],
    token_weights: Float32[Tensor, " tokens"],
    settings: LossSettings,
) -> tuple[Float32[Tensor, ""], dict[str, Float32[Tensor, ""]], dict[str, Float32[Tensor, ""]]]:
    """Loss of a micro-batch: its tokens' part of the sum above.

    `log_probs` are those of pi_theta, `engine_log_probs` those of mu. `old_log_probs` None means pi_old = pi_theta (the
    only optimiser step of a batch): the ratio is 1 in value and carries the gradient. Where `engine_log_probs` is NaN
    the engine gave none, and the token's correction is 1.

    Returns the loss with its gradient, and the sums and maxima of a `TokenStats`, detached, on the device.
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
