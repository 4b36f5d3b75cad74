"""Output layer and loss in one pass: log-probabilities, entropies and both gradients from one set of logits.

The loss is a sum over tokens, so its derivative by a token's log-probability is known as soon as that log-probability
is. The gradients by the hidden states and by the weight are therefore computed in the forward pass, chunk by chunk, while
the chunk's logits exist: three matrix products per chunk, where `log_probs` needs four because it computes the logits
again in backward. Liger's fused linear losses (arXiv 2410.10989) do this for cross-entropy. They and cut-cross-entropy
(arXiv 2411.09009) return no entropies, and compute the logits twice for a loss given per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional

TokenLoss = Callable[[Float32[Tensor, " chunk"], slice], Float32[Tensor, " chunk"]]
"""Loss of each token of a chunk, from the chunk's log-probabilities (with gradient) and its place in the micro-batch. It
must depend on nothing else that carries a gradient."""

LogProbsAndLoss = tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"], Float32[Tensor, ""]]
"""Log-probabilities and entropies (see `log_probs`) without gradient, and the loss, which carries it."""

_LOGITS_BYTES = {"cuda": 1_300_000_000, "cpu": 64_000_000}
"""Bytes of the logits that exist at the same time: on a GPU 4,096 tokens of a vocabulary of 150,000 in bfloat16."""
_MULTIPLE = 128


class FusedTokenLoss(torch.autograd.Function):
    """Output layer, log-softmax and `token_loss` in one, chunk by chunk.

    `scale` is 1 / temperature. The loss, the weight's and the bias's gradient are summed over chunks in float32.
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
        token_loss: TokenLoss,
    ) -> LogProbsAndLoss:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs_bias else None
        statistics, gradient = _formulas(hidden)
        for start in range(0, len(targets), chunk):
            rows = slice(start, min(start + chunk, len(targets)))
            logits = functional.linear(hidden[rows], weight, bias)
            log_probs[rows], entropy[rows], normaliser = statistics(logits, targets[rows], scale)
            chunk_loss, slopes = _loss_and_slopes(token_loss, log_probs[rows], rows)
            loss += chunk_loss
            grad_logits = gradient(logits, targets[rows], normaliser, slopes, scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(log_probs, entropy)
        return log_probs, entropy, loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (grad_hidden, grad_weight, grad_bias), ctx.gradients = ctx.gradients, (None, None, None)
        weight_dtype, bias_dtype = ctx.dtypes
        factor = gradients[2]
        return (
            None if grad_hidden is None else grad_hidden.mul_(factor),
            None if grad_weight is None else grad_weight.mul_(factor).to(weight_dtype),
            None if grad_bias is None else grad_bias.mul_(factor).to(bias_dtype),
            None,
            None,
            None,
            None,
        )


@torch.no_grad()
def fused_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int64[Tensor, " tokens"],
    scale: float,
    chunk: int,
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """Log-probabilities and entropies as `FusedTokenLoss` computes them, without loss or gradient."""
    statistics, _ = _formulas(hidden)
    log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    entropy = torch.empty_like(log_probs)
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        log_probs[rows], entropy[rows], _ = statistics(
            functional.linear(hidden[rows], weight, bias), targets[rows], scale
        )
    return log_probs, entropy


def fused_chunk(tokens: int, vocabulary: int, hidden: Float[Tensor, "tokens hidden"]) -> int:
    """Tokens in a chunk: as many as `_LOGITS_BYTES` hold, with near-equal chunks."""
    room = _LOGITS_BYTES["cuda" if hidden.is_cuda else "cpu"]
    most = max(room // (vocabulary * hidden.element_size()), 1)
    chunks = max(-(-tokens // most), 1)
    equal = -(-tokens // chunks)
    return max(min(-(-equal // _MULTIPLE) * _MULTIPLE, most), 1)


def _formulas(hidden: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    if hidden.is_cuda:
        from pods_cluster.learning import triton_kernels

        return triton_kernels.row_statistics, triton_kernels.gradient_of_logits
    return row_statistics, gradient_of_logits


def _loss_and_slopes(
    token_loss: TokenLoss, log_probs: Float32[Tensor, " chunk"], rows: slice
) -> tuple[Float32[Tensor, ""], Float32[Tensor, " chunk"]]:
    """Loss of a chunk, and its derivative by each log-probability."""
    with torch.enable_grad():
        free = log_probs.detach().requires_grad_()
        loss = token_loss(free, rows).sum()
        (slopes,) = torch.autograd.grad(loss, free)
    return loss.detach(), slopes


def row_statistics(
    logits: Float[Tensor, "chunk vocab"], targets: Int64[Tensor, " chunk"], scale: float
) -> tuple[Float32[Tensor, " chunk"], Float32[Tensor, " chunk"], Float32[Tensor, " chunk"]]:
    """Log-probability of the target, entropy and log-normaliser of softmax(logits x scale) in each row."""
    logits = logits.float() * scale
    normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    entropy = normaliser - torch.linalg.vecdot(torch.exp(logits - normaliser[:, None]), logits)
    return log_probs, entropy, normaliser


def gradient_of_logits(
    logits: Float[Tensor, "chunk vocab"],
    targets: Int64[Tensor, " chunk"],
    normaliser: Float32[Tensor, " chunk"],
    slopes: Float32[Tensor, " chunk"],
    scale: float,
) -> Float[Tensor, "chunk vocab"]:
    """scale x slope x (onehot(target) - softmax(logits x scale)) in each row, in the type of the logits."""
    factor = (slopes * scale)[:, None]
    gradient = torch.exp(logits.float() * scale - normaliser[:, None]).mul_(-factor)
    return gradient.scatter_add_(-1, targets[:, None], factor).to(logits.dtype)


def _add_product(total: Float32[Tensor, "a b"], left: Float[Tensor, "a n"], right: Float[Tensor, "n b"]) -> None:
    """Add `left @ right` to `total`; on a GPU the product itself is summed in float32 too."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
