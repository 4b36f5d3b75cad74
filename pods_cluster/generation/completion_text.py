"""The text of a completion, as rewards and people read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pods_cluster.generation.stop_strings import cut_at_stop
from pods_cluster.types import FinishReason, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionText:
    """Decodes completions with their special tokens: tags such as `<think>` or a tool call may be special ones.

    Left out is what only ends a text: the end and padding tokens of the tokenizer at its end, and one special token that
    ended the generation (a model may have several, such as `<|eot_id|>`), but for a closing tag such as `</answer>`; and
    what follows one of `stop_strings`, with the string itself unless `include_stop`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings, self._include_stop = stop_strings, include_stop
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._ends = {int(token) for token in ends if isinstance(token, int)}
        special = {
            token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
        } | set(tokenizer.all_special_ids)
        self._special = {
            token for token in special if not str(tokenizer.convert_ids_to_tokens(token)).startswith("</")
        } | self._ends

    def of(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return the texts of completions, in their order."""
        shown = [self._shown(rollout) for rollout in rollouts]
        texts = self._tokenizer.batch_decode(shown, skip_special_tokens=False, spaces_between_special_tokens=False)
        if not self._stop_strings:
            return texts
        return [
            cut_at_stop(text, self._stop_strings, self._include_stop)
            if rollout.finish_reason is FinishReason.STOP and rollout.turns == 1  # others end turns with them too
            else text
            for text, rollout in zip(texts, rollouts, strict=True)
        ]

    def _shown(self, rollout: Rollout) -> list[int]:
        stop = len(rollout.token_ids)
        while stop and rollout.token_ids[stop - 1] in self._ends:
            stop -= 1
        ended = stop == len(rollout.token_ids) and rollout.finish_reason is FinishReason.STOP
        if ended and stop and rollout.token_ids[stop - 1] in self._special:
            stop -= 1
        return rollout.token_ids[:stop]
