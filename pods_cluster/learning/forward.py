"""Forward pass of the policy: a micro-batch to log-probabilities, entropies and the loss of its completion tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from pods_cluster.learning import packed_attention
from pods_cluster.learning.fused_loss import TokenLoss
from pods_cluster.learning.log_probs import LOGITS_CHUNK, LogProbLinear, log_probs_from_logits, total_loss
from pods_cluster.learning.token_batch import TokenBatch, pack, pad

PolicyOutput = tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"], Float32[Tensor, ""] | None]
"""Log-probabilities and entropies of the completion tokens (see `log_probs`), and the loss if one was given."""


class Policy(nn.Module):
    """Causal language model that maps a batch to the log-probabilities of its completion tokens.

    With padding on the right a causal mask keeps every token of a sequence from attending to padding, and positions
    count from 0 in every row. So a padded batch needs neither an attention mask nor position ids, and attention takes its
    fast causal path. A packed batch needs a model whose attention is `packed_attention`.

    If the model is a decoder with a plain linear output layer, `enable_chunked_head` makes it compute logits chunk by
    chunk (see `log_probs`), and `fused_loss` the loss with them (see `fused_loss`). Any other structure (caps or scales on
    its logits, several heads) computes all logits. `chunk` tokens have logits at the same time; None: as many as suit.
    `entropy_gradient`: entropies carry a gradient, which needs the loss apart from the output layer.
    """

    def __init__(
        self, model: nn.Module, *, chunk: int | None = None, fused_loss: bool = False, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.entropy_gradient = entropy_gradient
        self.model = model
        self.chunk = chunk
        self.fused_loss = fused_loss
        self.chunked_head = False

    def forward(self, batch: TokenBatch, temperature: float, token_loss: TokenLoss | None = None) -> PolicyOutput:
        """Log-probabilities and entropies after division of the logits by `temperature`, and the sum of `token_loss`.

        With `fused_loss` the loss alone carries a gradient where one is given.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.layout is not None:
            inputs |= {"position_ids": batch.position_ids, "layout": batch.layout}
        if self.chunked_head:
            core = cast(Any, unwrap_peft(self.model))
            hidden = core.get_decoder()(**inputs).last_hidden_state
            hidden = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
            return core.get_output_embeddings()(
                hidden,
                targets=batch.targets,
                temperature=temperature,
                chunk=self.chunk,
                token_loss=token_loss,
                fused=self.fused_loss,
                entropy_gradient=self.entropy_gradient,
            )
        logits = self.model(**inputs).logits.flatten(0, 1)[batch.positions]
        log_probs, entropy = log_probs_from_logits(logits, batch.targets, temperature, self.chunk or LOGITS_CHUNK)
        entropy = entropy if self.entropy_gradient else entropy.detach()
        return log_probs, entropy, total_loss(log_probs, token_loss)

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

    @torch.no_grad()
    def enable_packing(self) -> str | None:
        """Use packed attention if it gives the model's own log-probabilities for a few sequences. Returns why not.

        The model must not be partitioned yet. With packed attention, padded batches go through torch's `sdpa`.
        """
        core = cast(Any, unwrap_peft(self.model))
        if not callable(getattr(core, "set_attn_implementation", None)):
            return f"{type(core).__name__} cannot change its attention"
        before = core.config._attn_implementation
        expected = self.sample_log_probs(packed=False)
        try:
            core.set_attn_implementation(packed_attention.NAME)
            difference = (self.sample_log_probs(packed=True) - expected).abs().mean().item()
        except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
            core.set_attn_implementation(before)
            return f"{type(core).__name__} cannot be packed: {error}"
        if not difference < log_prob_tolerance(expected, next(core.parameters()).dtype):
            core.set_attn_implementation(before)
            return f"{type(core).__name__} computes packed sequences differently (by {difference:.2g} nats a token)"
        return None

    @torch.no_grad()
    def sample_log_probs(self, *, packed: bool) -> Float32[Tensor, " tokens"]:
        """Log-probabilities of a few sequences, some of which share a prompt, to compare ways of computing them."""
        core = cast(Any, unwrap_peft(self.model))
        batch = sample_batch(core.get_input_embeddings().weight.shape[0], packed=packed)
        training = self.training
        self.eval()
        try:
            return self(batch.to(next(core.parameters()).device), 1.0)[0]
        finally:
            self.train(training)


def sample_batch(vocabulary: int, *, packed: bool) -> TokenBatch:
    """Micro-batch of a few sequences, some of which share a prompt."""
    ids = [(7 * i * i + 3 * i) % vocabulary for i in range(60)]
    first, second, third = ids[:9], ids[9:13], ids[13:19]
    pairs = [(first, ids[19:25]), (first, ids[25:26]), (first, ids[26:38]), (second, ids[38:45])]
    pairs += [(third, ids[45:50]), (third, ids[50:60])]
    return pack(pairs) if packed else pad(pairs)


def log_prob_tolerance(log_probs: Float32[Tensor, " tokens"], dtype: torch.dtype) -> float:
    """Mean difference of log-probabilities (nats) that rounding in `dtype` explains."""
    scale = 1.0 + log_probs.abs().mean().item()
    return scale * (1e-5 if dtype == torch.float32 else 1e-2)


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
