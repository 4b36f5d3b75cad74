"""Kept rollouts to tensors, and tensors to the log-probabilities of their completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pods_cluster.learning.log_probs import LOGITS_CHUNK, LogProbLinear, log_probs_of

TokenPair = tuple[Sequence[int], Sequence[int]]
"""Prompt ids [P] and completion ids [T]."""


@dataclass(slots=True)
class TokenBatch:
    """One padded micro-batch.

    `input_ids` [B, L] int64, padded on the right. The N completion tokens of all rows lie one after another:
    `positions` [N] index the flattened [B * L] at which each is predicted (one before its own place), `targets` [N]
    are their ids, `rows` [N] the row of each.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    rows: Tensor

    @property
    def tokens(self) -> int:
        return len(self.targets)


def collate(sequences: Sequence[TokenPair], device: torch.device | str = "cpu") -> TokenBatch:
    """Pad sequences on the right. With none of them: one row of one token and no targets, for a dummy pass."""
    if not sequences:
        sequences = [((0,), ())]
    lengths = [len(prompt) + len(completion) for prompt, completion in sequences]
    longest = max(lengths)
    ids, positions, targets, rows = [], [], [], []
    for row, (prompt, completion) in enumerate(sequences):
        ids.append([*prompt, *completion, *([0] * (longest - lengths[row]))])
        first = row * longest + len(prompt) - 1
        positions.extend(range(first, first + len(completion)))
        targets.extend(completion)
        rows.extend([row] * len(completion))
    return TokenBatch(
        torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(positions, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(targets, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
    )


class Policy(nn.Module):
    """A causal language model as the learner calls it: batch in, log-probabilities of the completion tokens out.

    With padding on the right no token of a sequence can attend to padding through a causal mask, and positions count
    from 0 in every row: neither an attention mask nor position ids are needed, and attention takes its fast causal
    path.

    Where the model is a decoder plus a plain linear output layer, logits are made chunk by chunk (see `head.py`); any
    other structure (caps or scales on its logits, several heads) goes through its own full logits. Which one is found
    by `probe`.
    """

    def __init__(self, model: nn.Module, *, chunk: int = LOGITS_CHUNK) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.chunked = False

    def forward(
        self, input_ids: Tensor, positions: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """float32 [N] log-probabilities (natural log, logits divided by `temperature`) and entropies (no gradient)."""
        if self.chunked:
            core = cast(Any, inner(self.model))
            hidden = core.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
            hidden = hidden.reshape(-1, hidden.shape[-1])[positions]
            return core.get_output_embeddings()(hidden, targets=targets, temperature=temperature, chunk=self.chunk)
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return log_probs_of(logits.reshape(-1, logits.shape[-1])[positions], targets, temperature, self.chunk)

    @torch.no_grad()
    def probe(self) -> bool:
        """Turn the chunked head on if the model's own logits come out of it for a few tokens; returns whether they do.

        Call it on an ordinary (not partitioned) model, on the device where its kernels run.
        """
        self.chunked = False
        core = cast(Any, inner(self.model))
        head: Any = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
        decoder = core.get_decoder() if hasattr(core, "get_decoder") else None
        if type(head) not in (nn.Linear, LogProbLinear) or decoder is None or decoder is core:
            return False
        device = next(core.parameters()).device
        ids = (torch.arange(8, device=device) % head.weight.shape[0])[None]
        training = core.training
        core.eval()
        try:
            expected = core(input_ids=ids, use_cache=False).logits.float()
            output = decoder(input_ids=ids, use_cache=False)
            logits = nn.Linear.forward(head, output.last_hidden_state).float()
        except (TypeError, AttributeError):
            return False
        finally:
            core.train(training)
        if expected.shape != logits.shape or not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3):
            return False
        head.__class__ = LogProbLinear
        self.chunked = True
        return True


def inner(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    tuner = getattr(model, "base_model", None)
    if tuner is not None and hasattr(model, "peft_config"):
        return cast(nn.Module, tuner.model)
    return model


def without_adapter(model: nn.Module) -> Any:
    """A context in which a PEFT model computes as its base model does."""
    disable = getattr(model, "disable_adapter", None)
    return disable() if callable(disable) and hasattr(model, "peft_config") else nullcontext()
