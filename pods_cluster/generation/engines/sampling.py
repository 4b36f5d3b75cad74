"""Sampling of the next token of every row of a batch, each row from its own reproducible stream.

A row's stream is counter-based: its t-th uniform number is a hash of (run seed, group id, rollout index, t), so it
depends neither on the batch that the row runs in nor on the worker. The token is the inverse of the row's cumulative
distribution at that number: small numerical differences between batches move a token only where the number lies
within them of a boundary.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt64
from torch import Tensor

from pods_cluster.types import GroupId

CHUNK_ELEMENTS = 1 << 22
"""Logits are worked on in row chunks of about so many elements: temporaries stay small at large vocabularies."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, group: GroupId, index: int, start: int = 0) -> int:
    """64-bit key of one rollout's stream, for each of its turns another one: the turn that begins after `start` tokens."""
    text = f"{seed}|{group.epoch}|{group.row}|{group.attempt}|{index}" + (f"|{start}" if start else "")
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: UInt64[np.ndarray, " rows"], counters: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, " rows"]:
    """Numbers in [0, 1) with 24 bits: the `counters[i]`-th of stream `keys[i]` (SplitMix64's output function)."""
    with np.errstate(over="ignore"):
        state = keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def sample(
    logits: Float[Tensor, "rows vocab"],
    *,
    temperature: Float32[np.ndarray, " rows"],
    keys: UInt64[np.ndarray, " rows"],
    counters: Int64[np.ndarray, " rows"],
    top_p: Float32[np.ndarray, " rows"],
    top_k: Int64[np.ndarray, " rows"],
    min_p: Float32[np.ndarray, " rows"],
) -> tuple[Int64[np.ndarray, " rows"], Float32[np.ndarray, " rows"]]:
    """The next token of each row and its natural log-probability.

    The log-probability is under the distribution that was sampled from: temperature applied, and for rows with a
    cut (`top_p` < 1, `top_k` > 0, `min_p` > 0) renormalised over what the cut left. Temperature 0 takes the most
    likely token (the lowest id of equals) and reports the untempered log-probability.
    """
    rows, vocabulary = logits.shape
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    numbers = uniforms(keys, counters)
    tokens = np.empty(rows, np.int64)
    logprobs = np.empty(rows, np.float32)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        cut = (top_p[part] < 1.0) | (top_k[part] > 0) | (min_p[part] > 0.0)
        cuts = (top_p[part], top_k[part], min_p[part]) if cut.any() else None
        tokens[part], logprobs[part] = _sample_chunk(logits[part], temperature[part], numbers[part], cut, cuts)
    return tokens, logprobs


def _sample_chunk(
    logits: Float[Tensor, "rows vocab"],
    temperature: Float32[np.ndarray, " rows"],
    numbers: Float32[np.ndarray, " rows"],
    cut: Bool[np.ndarray, " rows"],
    cuts: tuple[Float32[np.ndarray, " rows"], Int64[np.ndarray, " rows"], Float32[np.ndarray, " rows"]] | None,
) -> tuple[Int64[np.ndarray, " rows"], Float32[np.ndarray, " rows"]]:
    greedy = temperature == 0.0
    scale = np.where(greedy, np.float32(1.0), temperature)
    scores = logits.float()
    if (scale != 1.0).any():
        scores = scores / torch.from_numpy(scale).to(scores.device)[:, None]
    if cuts is not None:
        restricted = np.flatnonzero(cut & ~greedy)
        if len(restricted):
            index = torch.from_numpy(restricted).to(scores.device)
            selected = [torch.from_numpy(values[restricted]).to(scores.device)[:, None] for values in cuts]
            scores = scores.index_copy(0, index, restrict(scores[index], *selected))
    logp = torch.log_softmax(scores, dim=-1)
    if greedy.all():
        chosen = scores.argmax(dim=-1, keepdim=True)
    else:
        cumulative = logp.exp().cumsum_(dim=-1)
        total = cumulative[:, -1:]
        point = torch.from_numpy(numbers).to(scores.device)[:, None] * total
        # Below the total, so that a token of positive probability is hit; to its right, so that none of zero is.
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, point, right=True)
        if greedy.any():
            rows = torch.from_numpy(np.flatnonzero(greedy)).to(scores.device)
            chosen[rows] = scores[rows].argmax(dim=-1, keepdim=True)
    picked = logp.gather(1, chosen)
    return chosen[:, 0].cpu().numpy(), picked[:, 0].cpu().numpy()


def restrict(
    scores: Float[Tensor, "rows vocab"],
    top_p: Float[Tensor, "rows 1"],
    top_k: Int64[Tensor, "rows 1"],
    min_p: Float[Tensor, "rows 1"],
) -> Float[Tensor, "rows vocab"]:
    """Scores with everything outside the cuts at -inf: min-p first, then top-k, then top-p.

    The most likely token always stays. top-p counts probability after the cuts before it, and keeps the token with
    which the sum reaches p.
    """
    scores = scores.masked_fill(
        scores < scores.amax(dim=-1, keepdim=True) + torch.log(min_p.clamp(min=0.0)), -torch.inf
    )
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)[None]
    dropped = (rank >= top_k) & (top_k > 0)
    ordered = ordered.masked_fill(dropped, -torch.inf)
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    dropped = (before >= top_p) & (top_p < 1.0) & (rank > 0)
    ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
