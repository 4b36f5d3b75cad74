"""Rows of the task as padded token tensors, and exact accuracies from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from pods_cluster.quickstart.character_tokenizer import PAD_ID
from pods_cluster.quickstart.task import Row

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids of some rows: prompt, answer, end token, right padding.

    `labels` equal `ids` at the answer and the end token, and are IGNORED elsewhere.
    """

    ids: Int64[Tensor, "rows tokens"]
    labels: Int64[Tensor, "rows tokens"]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def take(self, rows: Int64[Tensor, " taken"]) -> Batch:
        """Return the batch of these rows."""
        return Batch(self.ids[rows], self.labels[rows])


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers in [0, 1]: `greedy` with greedy decoding, `sampled` as expected at temperature 1."""

    greedy: float
    sampled: float


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """Render the prompt of a row: the chat template around one user turn."""
    messages = [{"role": "user", "content": row["prompt"]}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Batch:
    """Encode rows as one batch, padded to the longest; only answer and end token are learned and judged."""
    prompts = [tokenizer.encode(render_prompt(tokenizer, row), add_special_tokens=False) for row in rows]
    answers = [tokenizer.encode(f"{row['answer']}{tokenizer.eos_token}", add_special_tokens=False) for row in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), PAD_ID)
    labels = torch.full((len(rows), width), IGNORED)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return Batch(ids, labels)


@torch.inference_mode()
def accuracy(model: Qwen2ForCausalLM, batch: Batch) -> Accuracy:
    """Compute the exact accuracy without generating anything.

    Greedy decoding gives the right answer if and only if the model, fed the right answer, ranks each of its tokens
    first; the probability of sampling it is the product of the tokens' probabilities.
    """
    labels = batch.labels[:, 1:]
    judged = labels != IGNORED
    logits = model(batch.ids[:, :-1], use_cache=False).logits.float()
    first = (logits.argmax(-1) == labels) | ~judged
    targets = labels.masked_fill(~judged, 0)
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    chance = logprobs.masked_fill(~judged, 0.0).sum(-1).exp()
    return Accuracy(greedy=first.all(-1).float().mean().item(), sampled=chance.mean().item())
