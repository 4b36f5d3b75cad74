"""Attention over a pack (see `token_batch`), as an attention implementation that transformers' models take by name.

On a GPU in bfloat16 or float16: FlashAttention's kernels for sequences of different lengths, which torch brings. One
call computes causal attention inside every segment; a second lets the completions attend to their shared prompts, all
completions of a prompt at once. Both are parts of one softmax: they are merged by their normalisers, and the backward
kernels, given the merged output and normaliser, return the exact gradient of each part. Elsewhere the same by
`scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pods_cluster.learning.token_batch import AttentionLayout

NAME = "pods_packed"
"""The implementation's name in transformers."""
_LARGEST_HEAD = 256


class UnsupportedAttention(ValueError):
    """A model whose attention this implementation cannot compute; the text says why."""


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: AttentionLayout | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """(query [1, heads, T, D], key and value [1, kv heads, T, D]) -> output [1, T, heads, D].

    Without a layout it is transformers' own `sdpa`. Raises UnsupportedAttention for dropout, windows shorter than the
    longest sequence, capped scores and attention sinks.
    """
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    _check(layout, dropout, options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _LARGEST_HEAD:
        return _FlashPacked.apply(q, k, v, layout, scale)[None], None
    return _by_sequence(q, k, v, layout, scale)[None], None


def _check(layout: AttentionLayout, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedAttention(f"dropout {dropout} in attention")
    window = options.get("sliding_window")
    if window is not None and window < layout.longest_context:
        raise UnsupportedAttention(f"a sliding window of {window} tokens")
    for name in ("softcap", "s_aux", "head_mask", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedAttention(f"attention with {name}")


AttentionInterface.register(NAME, packed_attention)


class _FlashPacked(torch.autograd.Function):
    """(q [T, heads, D], k and v [T, kv heads, D], layout, scale) -> [T, heads, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
        from pods_cluster.learning.triton_kernels import merge_in_place

        longest = max(layout.segments)
        starts = layout.segment_starts
        out, norm, state = _flash(q, k, v, starts, starts, longest, longest, True, scale)
        states = [state]
        if layout.prompts:
            rows, prompts = _slices(layout)
            other, other_norm, state = _flash(
                q[rows],
                k[prompts],
                v[prompts],
                layout.answer_starts,
                layout.prompt_starts,
                max(layout.answers),
                max(layout.prompts),
                False,
                scale,
            )
            states.append(state)
            merge_in_place(out[rows], norm[:, rows], other, other_norm)
        ctx.save_for_backward(q, k, v, out, norm, *states)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, norm, *states = ctx.saved_tensors
        layout: AttentionLayout = ctx.layout
        grad = gradients[0].contiguous()
        longest = max(layout.segments)
        starts = layout.segment_starts
        dq, dk, dv = _flash_backward(
            grad, q, k, v, out, norm, starts, starts, longest, longest, True, states[0], ctx.scale
        )
        if layout.prompts:
            rows, prompts = _slices(layout)
            more_q, more_k, more_v = _flash_backward(
                grad[rows],
                q[rows],
                k[prompts],
                v[prompts],
                out[rows],
                norm[:, rows].contiguous(),
                layout.answer_starts,
                layout.prompt_starts,
                max(layout.answers),
                max(layout.prompts),
                False,
                states[1],
                ctx.scale,
            )
            dq[rows] += more_q
            dk[prompts] += more_k
            dv[prompts] += more_v
        return dq, dk, dv, None, None


def _slices(layout: AttentionLayout) -> tuple[slice, slice]:
    """The tokens that attend to a shared prompt, and the shared prompts' tokens."""
    end = sum(layout.prompts)
    return slice(end, end + sum(layout.answers)), slice(0, end)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, heads, D], normalisers float32 [heads, T], and what the backward kernel asks back."""
    out, norm, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_starts, k_starts, longest_q, longest_k, 0.0, causal, False, scale=scale
    )
    return out, norm, state


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        norm,
        q_starts,
        k_starts,
        longest_q,
        longest_k,
        0.0,
        causal,
        state,
        unused,
        scale=scale,
    )


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """The output of packed attention from one `scaled_dot_product_attention` a segment. Completions have their prompt's
    keys before their own."""
    parts: list[Tensor] = []
    # Not a slice for each: the backward of every slice makes a gradient as large as the whole pack.
    queries, own_keys, own_values = (tensor.split(list(layout.segments)) for tensor in (q, k, v))
    for index, prompt in enumerate(_prompt_of_segments(layout)):
        length, keys, values, mask = layout.segments[index], own_keys[index], own_values[index], None
        if prompt is not None:
            keys, values = torch.cat([own_keys[prompt], keys]), torch.cat([own_values[prompt], values])
            before = len(keys) - length
            mask = torch.ones(length, len(keys), dtype=torch.bool, device=q.device).tril(before)
        out = functional.scaled_dot_product_attention(
            queries[index].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _prompt_of_segments(layout: AttentionLayout) -> list[int | None]:
    """The shared prompt that each segment attends to beside itself; the first segments are the shared prompts."""
    found: list[int | None] = [None] * len(layout.prompts)
    index, left = 0, layout.answers[0] if layout.answers else 0
    for length in layout.segments[len(layout.prompts) :]:
        while left == 0 and index + 1 < len(layout.prompts):
            index += 1
            left = layout.answers[index]
        if left == 0:
            found.append(None)
        else:
            found.append(index)
            left -= length
    return found
