"""Log-probabilities of given completions: one forward over each, nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pods_cluster.generation.engine import EngineError
from pods_cluster.generation.engines.builtin.hf_model import Forward
from pods_cluster.generation.engines.builtin.right_padding import right_padded

SCORE_ELEMENTS = 1 << 25
"""Largest number of logits that one forward may make."""


@torch.inference_mode()
def score(
    forward: Forward, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[list[float]]:
    """The T natural logs of each (prompt ids [P], completion ids [T]), in batches of near-equal length."""
    results: list[list[float]] = [[] for _ in sequences]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]) + len(sequences[i][1]))
    while order:
        longest, chunk = 0, []
        while order:
            longest = max(longest, sum(map(len, sequences[order[0]])))
            if chunk and (len(chunk) + 1) * longest * forward.vocabulary > SCORE_ELEMENTS:
                break
            chunk.append(order.pop(0))
        for index, values in zip(chunk, _score_chunk(forward, [sequences[i] for i in chunk], temperature), strict=True):
            results[index] = values
    return results


def _score_chunk(
    forward: Forward, sequences: list[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[list[float]]:
    for number, (prompt, completion) in enumerate(sequences):
        if not len(prompt) or (forward.context and len(prompt) + len(completion) > forward.context):
            raise EngineError(
                f"score: sequence {number} has {len(prompt)} prompt and {len(completion)} completion tokens; it "
                f"needs a prompt and at most {forward.context} tokens in all"
            )
    ids, _ = right_padded([(*prompt, *completion) for prompt, completion in sequences])
    rows, longest = ids.shape
    ids = ids.to(forward.device)
    positions = torch.arange(longest, device=ids.device)[None].expand(rows, -1)
    logits = forward(ids, positions, None, forward.causal_mask(rows, longest)).float()
    logp = torch.log_softmax(logits[:, :-1] / (temperature or 1.0), dim=-1)
    picked = logp.gather(2, ids[:, 1:, None])[..., 0].cpu()
    return [
        picked[row, len(prompt) - 1 : len(prompt) - 1 + len(completion)].tolist()
        for row, (prompt, completion) in enumerate(sequences)
    ]
