"""Triton kernels of the learner: over rows of logits, and to merge two parts of one attention.

Imported on a GPU only; `fused_loss` holds the formulas of the first two in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float, Float32, Int64
from torch import Tensor

_BLOCK = 8192
_WARPS = 16
_ROWS = 32


def row_statistics(
    logits: Float[Tensor, "tokens vocab"], targets: Int64[Tensor, " tokens"], scale: float
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """`fused_loss.row_statistics` in one pass over the logits."""
    tokens, vocabulary = logits.shape
    log_probs = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
    _launch(_row_statistics, (tokens,))(
        logits,
        targets,
        log_probs,
        entropy,
        normaliser,
        scale,
        logits.stride(0),
        vocabulary,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return log_probs, entropy, normaliser


def gradient_of_logits(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int64[Tensor, " tokens"],
    normaliser: Float32[Tensor, " tokens"],
    slopes: Float32[Tensor, " tokens"],
    scale: float,
) -> Float[Tensor, "tokens vocab"]:
    """`fused_loss.gradient_of_logits`, written over the logits."""
    tokens, vocabulary = logits.shape
    _launch(_gradient_of_logits, (tokens, triton.cdiv(vocabulary, _BLOCK)))(
        logits, targets, normaliser, slopes, scale, logits.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return logits


def merge_in_place(
    out: Float[Tensor, "tokens heads dim"],
    norm: Float32[Tensor, "heads tokens"],
    other: Float[Tensor, "tokens heads dim"],
    other_norm: Float32[Tensor, "heads tokens"],
) -> None:
    """Merge attention over other keys into `out`, and its log-normalisers into `norm`: one softmax over both."""
    tokens, heads, dim = out.shape
    _launch(_merge, (triton.cdiv(tokens, _ROWS), heads))(
        out,
        norm,
        other,
        other_norm,
        tokens,
        out.stride(0),
        out.stride(1),
        other.stride(0),
        other.stride(1),
        norm.stride(0),
        other_norm.stride(0),
        dim,
        ROWS=_ROWS,
        DIM=triton.next_power_of_2(dim),
    )


def _launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    """A kernel over a grid, to be called with its arguments."""
    return kernel[grid]


@triton.jit
def _row_statistics(
    logits,
    targets,
    log_probs,
    entropy,
    normaliser,
    scale,
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    columns = tl.arange(0, BLOCK)
    highest = float("-inf")
    total = 0.0  # sum of exp(x - highest)
    weighted = 0.0  # sum of exp(x - highest) x
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        x = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(highest, tl.max(x, axis=0))
        shrink = tl.exp(highest - higher)
        e = tl.exp(x - higher)
        total = total * shrink + tl.sum(e, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * x, 0.0), axis=0)
        highest = higher
    log_total = highest + tl.log(total)
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(log_probs + row, target - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(normaliser + row, log_total)


@triton.jit
def _gradient_of_logits(
    logits,
    targets,
    normaliser,
    slopes,
    scale,
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    place = logits + row * stride + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    probability = tl.exp(x - tl.load(normaliser + row))
    hit = (columns == tl.load(targets + row)).to(tl.float32)
    value = (hit - probability) * (tl.load(slopes + row) * scale)
    tl.store(place, value.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    out,
    norm,
    other,
    other_norm,
    tokens,
    out_row,
    out_head,
    other_row,
    other_head,
    norm_head,
    other_norm_head,
    dim,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    there = rows < tokens
    own_place = norm + head * norm_head + rows
    own = tl.load(own_place, mask=there, other=0.0)
    added = tl.load(other_norm + head * other_norm_head + rows, mask=there, other=0.0)
    higher = tl.maximum(own, added)
    merged = higher + tl.log(tl.exp(own - higher) + tl.exp(added - higher))
    columns = tl.arange(0, DIM)
    inside = there[:, None] & (columns < dim)[None, :]
    place = out + rows[:, None] * out_row + head * out_head + columns[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(other + rows[:, None] * other_row + head * other_head + columns[None, :], mask=inside, other=0.0)
    value = a * tl.exp(own - merged)[:, None] + b.to(tl.float32) * tl.exp(added - merged)[:, None]
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)
    tl.store(own_place, merged, mask=there)
