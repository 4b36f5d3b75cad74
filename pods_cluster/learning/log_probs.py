"""Log-probabilities of given tokens without the matrix of all logits.

For a vocabulary of 150,000 the float32 logits of 16,384 tokens take 9.8 GB, and their gradient as much again. Here they
exist for one chunk of tokens at a time: forward keeps one number per token, backward computes the chunk's logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pods_cluster.learning.fused_loss import FusedTokenLoss, TokenLoss, fused_chunk, fused_log_probs

LOGITS_CHUNK = 1024
"""Tokens in a chunk, whose logits exist at the same time."""


LogProbsAndEntropy = tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]
"""Natural log-probability of each target under softmax(logits / temperature), and that distribution's entropy in nats. Both
carry a gradient."""


class TokenLogProbs(torch.autograd.Function):
    """Output layer and log-softmax in one, chunk by chunk: the differentiable part of `LogProbLinear`.

    `scale` is 1 / temperature. The weight's gradient is summed over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "tokens hidden"],
        weight: Float[Tensor, "vocab hidden"],
        bias: Float[Tensor, " vocab"] | None,
        targets: Int64[Tensor, " tokens"],
        scale: float,
        chunk: int,
    ) -> LogProbsAndEntropy:
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, scale)
            normaliser = torch.logsumexp(logits, dim=-1)
            log_probs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - normaliser
            probabilities = torch.exp(logits - normaliser[:, None])
            entropy[rows] = normaliser - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scale, ctx.chunk = scale, chunk
        ctx.set_materialize_grads(False)  # an entropy that is only read costs nothing in backward
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = torch.zeros_like(targets, dtype=torch.float32) if gradients[0] is None else gradients[0].float()
        grad_entropy = None if gradients[1] is None else gradients[1].float()
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs_bias else None
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = _logits(hidden[rows], weight, bias, ctx.scale)
            # d log p(target) / d logits = onehot(target) - softmax(logits)
            probabilities = torch.softmax(logits, dim=-1)
            taken = -grad[rows, None]
            grad_logits = probabilities.mul_(taken) if grad_entropy is None else probabilities * taken
            grad_logits.scatter_add_(-1, targets[rows, None], grad[rows, None])
            if grad_entropy is not None:  # d entropy / d logits = - p (log p + entropy)
                surprise = torch.log_softmax(logits, dim=-1)
                entropy = -torch.linalg.vecdot(probabilities, surprise)
                grad_logits.sub_(surprise.add_(entropy[:, None]).mul_(probabilities).mul_(grad_entropy[rows, None]))
            grad_logits.mul_(ctx.scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            low = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = low @ weight
            if grad_weight is not None:
                grad_weight += low.t() @ hidden[rows]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _logits(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    scale: float,
) -> Float32[Tensor, "tokens vocab"]:
    """Logits divided by the temperature."""
    logits = functional.linear(hidden, weight, bias).float()
    return logits.mul_(scale) if scale != 1.0 else logits


class LogProbLinear(nn.Linear):
    """Output layer that, given targets, returns log-probabilities, entropies and (given a loss) the loss, not logits.

    All chunks are one call of this module, so under ZeRO-3 every rank gathers the weight once per pass, however many
    tokens it has. A loaded model's layer becomes one by `layer.__class__ = LogProbLinear`.
    """

    def forward(  # type: ignore[override]
        self,
        input: Float[Tensor, "... hidden"],
        targets: Int64[Tensor, " tokens"] | None = None,
        temperature: float = 1.0,
        chunk: int | None = None,
        token_loss: TokenLoss | None = None,
        fused: bool = False,
        entropy_gradient: bool = False,
    ) -> Any:
        """Logits without `targets`; else a tuple (log-probabilities, entropies, loss).

        `fused` computes the loss's gradients in this pass (`fused_loss`); log-probabilities carry a gradient only without
        it. The loss is None without `token_loss`. `chunk` None: as large as suits the way.
        """
        if targets is None:
            return super().forward(input)
        scale = 1.0 / temperature
        if fused and (token_loss is not None or not torch.is_grad_enabled()):
            size = chunk or fused_chunk(len(targets), self.weight.shape[0], input)
            if token_loss is None:
                return *fused_log_probs(input, self.weight, self.bias, targets, scale, size), None
            return FusedTokenLoss.apply(input, self.weight, self.bias, targets, scale, size, token_loss)
        log_probs, entropy = TokenLogProbs.apply(input, self.weight, self.bias, targets, scale, chunk or LOGITS_CHUNK)
        return log_probs, entropy if entropy_gradient else entropy.detach(), total_loss(log_probs, token_loss)


def total_loss(log_probs: Float32[Tensor, " tokens"], token_loss: TokenLoss | None) -> Float32[Tensor, ""] | None:
    """Sum of the tokens' losses; None without a loss."""
    return None if token_loss is None else token_loss(log_probs, slice(0, len(log_probs))).sum()


def log_probs_from_logits(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int64[Tensor, " tokens"],
    temperature: float,
    chunk: int = LOGITS_CHUNK,
) -> LogProbsAndEntropy:
    """Log-probabilities and entropies from logits that exist already; each chunk is computed again in backward."""
    parts = [
        checkpoint(
            _chunk_log_probs,
            logits[start : start + chunk],
            targets[start : start + chunk],
            temperature,
            use_reentrant=False,
        )
        for start in range(0, max(len(targets), 1), chunk)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk_log_probs(
    logits: Float[Tensor, "tokens vocab"], targets: Int64[Tensor, " tokens"], temperature: float
) -> LogProbsAndEntropy:
    log_probs = functional.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy
