"""Forward pass of the policy: kept rollouts to a padded batch, and that to log-probabilities of completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from pods_cluster.learning.log_probs import LOGITS_CHUNK, LogProbLinear, LogProbsAndEntropy, log_probs_from_logits

TokenPair = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and completion ids of one sequence."""


@dataclass(slots=True)
class TokenBatch:
    """One micro-batch, padded on the right.

    The completion tokens of all rows lie one after another: `targets` are their ids, `rows` the row of each, and
    `positions` the index into the flattened batch at which each is predicted (one before its own).
    """

    input_ids: Int64[Tensor, "rows length"]
    positions: Int64[Tensor, " tokens"]
    targets: Int64[Tensor, " tokens"]
    rows: Int64[Tensor, " tokens"]

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return len(self.targets)


def collate(sequences: Sequence[TokenPair], device: torch.device | str = "cpu") -> TokenBatch:
    """Pad sequences on the right. Without any: one row of one token and no targets, for a dummy pass."""
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
    """Causal language model that maps a batch to the log-probabilities of its completion tokens.

    With padding on the right a causal mask keeps every token of a sequence from attending to padding, and positions
    count from 0 in every row. So neither an attention mask nor position ids are needed, and attention takes its fast
    causal path.

    If the model is a decoder with a plain linear output layer, `enable_chunked_head` makes it compute logits chunk by
    chunk (see `log_probs`). Any other structure (caps or scales on its logits, several heads) computes all logits.
    """

    def __init__(self, model: nn.Module, *, chunk: int = LOGITS_CHUNK) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.chunked_head = False

    def forward(
        self,
        input_ids: Int64[Tensor, "rows length"],
        positions: Int64[Tensor, " tokens"],
        targets: Int64[Tensor, " tokens"],
        temperature: float,
    ) -> LogProbsAndEntropy:
        """Log-probabilities of `targets` and entropies, both after division of the logits by `temperature`."""
        if self.chunked_head:
            core = cast(Any, unwrap_peft(self.model))
            hidden = core.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
            hidden = hidden.reshape(-1, hidden.shape[-1])[positions]
            return core.get_output_embeddings()(hidden, targets=targets, temperature=temperature, chunk=self.chunk)
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return log_probs_from_logits(logits.reshape(-1, logits.shape[-1])[positions], targets, temperature, self.chunk)

    @torch.no_grad()
    def enable_chunked_head(self) -> bool:
        """Use the chunked head if it reproduces the model's own logits for a few tokens. Returns whether it does.

        The model must not be partitioned yet, and lie on a device where its kernels run.
        """
        self.chunked_head = False
        core = cast(Any, unwrap_peft(self.model))
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
        self.chunked_head = True
        return True


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside a PEFT wrapper, or the model itself."""
    tuner = getattr(model, "base_model", None)
    if tuner is not None and hasattr(model, "peft_config"):
        return cast(nn.Module, tuner.model)
    return model


def adapter_disabled(model: nn.Module) -> Any:
    """Context in which a PEFT model computes as its base model does."""
    disable = getattr(model, "disable_adapter", None)
    return disable() if callable(disable) and hasattr(model, "peft_config") else nullcontext()
