"""The GRPO-PODS objective of one micro-batch (arXiv 2504.13818, eq. 1 and section 3), and statistics beside it.

Three policies: mu, the engine that sampled; pi_old, the learner at the start of the step; pi_theta, the learner now.
An optimiser step minimises, over all tokens t of all kept rollouts i of its groups,

    L(theta) = - sum_i,t  w_i * c_i,t * min( r_i,t * A_i,  clip(r_i,t, 1 - clip_low, 1 + clip_high) * A_i )
               + kl_coefficient * sum_i,t  w_i * ( q_i,t - log q_i,t - 1 )

    r_i,t = pi_theta(o_i,t) / pi_old(o_i,t)            the clipped ratio; the only factor with a gradient
    c_i,t = min( pi_old(o_i,t) / mu(o_i,t), C )        the importance correction: detached, 1 where it is off
    q_i,t = pi_ref(o_i,t) / pi_theta(o_i,t)            k3 estimate of KL(pi_theta || pi_ref), off by default

With `importance: sequence` (GSPO, arXiv 2507.18071, eqs. 5 to 7) r_i,t is the same for all tokens of a rollout, their geometric
mean

    r_i = ( prod_t pi_theta(o_i,t) / pi_old(o_i,t) ) ^ (1 / |o_i|)

and with `objective: cispo` (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5, without a lower bound as in its experiments) the
minimum is replaced by sg[ min(r_i,t, 1 + clip_high) ] * A_i * log pi_theta(o_i,t), where sg[] carries no gradient.

Each probability is that of the sampled token o_i,t given its prompt and the tokens before it; those that an environment wrote
between turns are among the latter, and in no sum nor in |o_i|. A_i is the advantage over the group's kept rollouts
(`advantage`), and w_i the token weight (`step_plan`): 1 / (groups * kept * |o_i|) for `sequence_mean`. mu enters through c
alone and is never the denominator of the clipped ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float32, Int64
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
    objective: Literal["clip", "cispo"] = "clip"
    importance: Literal["token", "sequence"] = "token"


@dataclass(frozen=True, slots=True, eq=False)
class GrpoLoss:
    """Objective of a micro-batch: its tokens' part of the sum above, and statistics over them.

    `engine_log_probs` are those of mu, NaN where the engine gave none; such a token's correction is 1. `old_log_probs`
    None means pi_old = pi_theta (the only optimiser step of a batch): the ratio is 1 in value and carries the gradient.
    `rows` is the rollout of each token, for `importance: sequence`, which takes all tokens of a micro-batch at once.
    `scored_log_probs` are those of pi_old in c where a training pass gives others, because it drops parts of adapters.
    """

    old_log_probs: Float32[Tensor, " tokens"] | None
    engine_log_probs: Float32[Tensor, " tokens"] | None
    reference_log_probs: Float32[Tensor, " tokens"] | None
    advantages: Float32[Tensor, " tokens"]
    token_weights: Float32[Tensor, " tokens"]
    settings: LossSettings
    scored_log_probs: Float32[Tensor, " tokens"] | None = None
    rows: Int64[Tensor, " tokens"] | None = None

    def token_losses(
        self, log_probs: Float32[Tensor, " chunk"], tokens: slice = slice(None)
    ) -> Float32[Tensor, " chunk"]:
        """Loss of each of these `tokens` of the micro-batch, given their log-probabilities under pi_theta."""
        settings = self.settings
        advantages, weights = self.advantages[tokens], self.token_weights[tokens]
        ratio = self._ratio(log_probs, tokens)
        if settings.objective == "cispo":
            objective = ratio.detach().clamp(max=1.0 + settings.clip_high) * advantages * log_probs
        else:
            clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
            objective = torch.minimum(ratio * advantages, clipped * advantages)
        if settings.correction and self.engine_log_probs is not None:
            objective = objective * self._correction(torch.exp(self._gap(log_probs, tokens)))
        losses = -weights * objective
        if self.reference_log_probs is not None:
            losses = losses + settings.kl_coefficient * weights * self._kl(log_probs, tokens)
        return losses

    @torch.no_grad()
    def statistics(
        self, log_probs: Float32[Tensor, " tokens"]
    ) -> tuple[dict[str, Float32[Tensor, ""]], dict[str, Float32[Tensor, ""]]]:
        """Sums and maxima of a `TokenStats` over the whole micro-batch, on the device."""
        settings, tokens = self.settings, slice(None)
        ratio = self._ratio(log_probs, tokens)
        sums: dict[str, Tensor] = {"tokens": ratio.new_full((), float(len(ratio))), "ratio": ratio.sum()}
        sums["clipped_low"] = ((ratio < 1.0 - settings.clip_low) & (self.advantages < 0)).float().sum()
        sums["clipped_high"] = ((ratio > 1.0 + settings.clip_high) & (self.advantages > 0)).float().sum()
        maxima: dict[str, Tensor] = {}
        if len(ratio):
            maxima["clipped_low_negated"] = -sums["clipped_low"] / len(ratio)
            maxima["clipped_high"] = sums["clipped_high"] / len(ratio)
        if self.engine_log_probs is not None and len(ratio):
            known = torch.isfinite(self.engine_log_probs)
            gap = self._gap(log_probs, tokens)
            factor = torch.exp(gap)
            sums["mismatch_tokens"] = known.float().sum()
            sums["mismatch_abs"] = gap.abs().sum()
            sums["mismatch_k3"] = (torch.expm1(gap) - gap).sum()
            sums["factor"] = torch.where(known, factor, 0.0).sum()
            maxima["mismatch_max"] = gap.abs().max()
            maxima["factor"] = factor.max()
            maxima["factor_negated"] = -factor.min()
            if settings.correction:
                used = self._correction(factor)
                sums["capped"] = (factor > settings.correction_cap).float().sum()
                if settings.correction_mask is not None:
                    sums["masked"] = self._masked(factor).float().sum()
                sums["used"] = used.sum()
                sums["used_squared"] = used.square().sum()
        if self.reference_log_probs is not None:
            sums["kl"] = self._kl(log_probs, tokens).sum()
        sums["loss"] = self.token_losses(log_probs).sum()
        return sums, maxima

    def _old(self, log_probs: Float32[Tensor, " chunk"], tokens: slice) -> Float32[Tensor, " chunk"]:
        return log_probs.detach() if self.old_log_probs is None else self.old_log_probs[tokens]

    def _ratio(self, log_probs: Float32[Tensor, " chunk"], tokens: slice) -> Float32[Tensor, " chunk"]:
        """pi_theta / pi_old, of each token or of its whole rollout."""
        gap = log_probs - self._old(log_probs, tokens)
        if self.settings.importance == "sequence":
            gap = self._rollout_mean(gap)
        return torch.exp(gap.clamp(-LOG_LIMIT, LOG_LIMIT))

    def _rollout_mean(self, values: Float32[Tensor, " tokens"]) -> Float32[Tensor, " tokens"]:
        """The mean over the tokens of its rollout, for each token."""
        rows = self.rows
        if rows is None or len(rows) != len(values):
            raise ValueError(
                f"importance: sequence needs all {0 if rows is None else len(rows)} tokens, not {len(values)}"
            )
        if not len(values):
            return values
        count = int(rows.max()) + 1
        sums = values.new_zeros(count).index_add(0, rows, values)
        lengths = values.new_zeros(count).index_add(0, rows, torch.ones_like(values))
        return (sums / lengths.clamp(min=1.0))[rows]

    def _gap(self, log_probs: Float32[Tensor, " chunk"], tokens: slice) -> Float32[Tensor, " chunk"]:
        """log(pi_old / mu), 0 where mu is not known."""
        assert self.engine_log_probs is not None
        engine = self.engine_log_probs[tokens]
        old = self._old(log_probs, tokens) if self.scored_log_probs is None else self.scored_log_probs[tokens]
        gap = torch.where(torch.isfinite(engine), old - engine, 0.0)
        return gap.clamp(-LOG_LIMIT, LOG_LIMIT)

    def _masked(self, factor: Float32[Tensor, " chunk"]) -> Bool[Tensor, " chunk"]:
        """Whether a factor lies outside the correction's mask."""
        low, high = self.settings.correction_mask or (0.0, math.inf)
        return (factor < low) | (factor > high)

    def _correction(self, factor: Float32[Tensor, " chunk"]) -> Float32[Tensor, " chunk"]:
        """c of the objective: capped, and 0 where the mask leaves a token out."""
        capped = factor.clamp(max=self.settings.correction_cap)
        return capped if self.settings.correction_mask is None else torch.where(self._masked(factor), 0.0, capped)

    def _kl(self, log_probs: Float32[Tensor, " chunk"], tokens: slice) -> Float32[Tensor, " chunk"]:
        """k3 estimate, which is unbiased and never negative."""
        assert self.reference_log_probs is not None
        gap = (self.reference_log_probs[tokens] - log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)
        return torch.expm1(gap) - gap
