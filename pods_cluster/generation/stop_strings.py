"""Stop strings: texts of any number of tokens that end a completion, found token by token.

A string may begin and end in the middle of a token. The tokens stay as they were sampled, so that their log-probabilities
are those of the engine; only the text is cut, as vLLM does it (`include_stop_str_in_output`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int64

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN = 8
"""Tokens before the place where a string can begin: the first ones of a window may decode to something else than they do
in the whole text."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Says which token completes one of `strings`. Each token is one of at most `len(tokenizer)`.

    Most tokens cannot be the last one of a string, which a table tells: text is decoded for the few that can.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._window = max(len(text.encode()) for text in self.strings) + _MARGIN
        self._last = self._possible_last_tokens()

    def ends(self, token_ids: Sequence[int] | Int64[np.ndarray, " tokens"]) -> bool:
        """Whether a string is whole with the last of these tokens, the first ones of a completion.

        None of them was whole before it: the completion would have ended there.
        """
        last = token_ids[-1]
        if not 0 <= last < len(self._last) or not self._last[last]:
            return False
        text = self._decode(token_ids[-self._window :])
        if text.startswith(_BROKEN):  # the window begins inside a character
            text = self._decode(token_ids)
        return any(string in text for string in self.strings)

    def _possible_last_tokens(self) -> Bool[np.ndarray, " vocabulary"]:
        """Tokens that a string can end in: one begins with an end of the string, or holds it."""
        count = len(self._tokenizer)
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):  # a token changes the text before it
            return np.ones(count, bool)
        anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        before = self._decode(anchor)
        pairs = self._tokenizer.batch_decode(
            [[*anchor, token] for token in range(count)],
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
        ends = {string[start:] for string in self.strings for start in range(len(string))}
        longest = max(map(len, self.strings))

        def can_be_last(text: str) -> bool:
            if not text.startswith(before) or _BROKEN in text:  # a part of a character
                return True
            own = text[len(before) :]
            return any(own[:size] in ends for size in range(1, min(len(own), longest) + 1)) or any(
                string in own for string in self.strings
            )

        return np.fromiter(map(can_be_last, pairs), bool, count)

    def _decode(self, token_ids: Sequence[int] | Int64[np.ndarray, " tokens"]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, spaces_between_special_tokens=False)
        )


class StopStringsByRequest:
    """The `StopStrings` of requests, made once for each set of strings. `tokenizer` None: no request may have any."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], StopStrings] = {}

    def of(self, strings: tuple[str, ...]) -> StopStrings | None:
        """The matcher of a request's `stop_strings`; None where it has none. Raises ValueError without a tokenizer."""
        if not strings:
            return None
        if strings not in self._known:
            if self._tokenizer is None:
                raise ValueError(
                    f"stop_strings: {list(strings)} need a tokenizer, and this engine was made without one"
                )
            self._known[strings] = StopStrings(self._tokenizer, strings)
        return self._known[strings]

    def ended(
        self, completions: Iterable[tuple[tuple[str, ...], Int64[np.ndarray, " tokens"]]]
    ) -> Bool[np.ndarray, " rows"]:
        """Whether the last token completes a string, for each pair of stop strings and tokens."""
        found = [(known := self.of(strings)) is not None and known.ends(tokens) for strings, tokens in completions]
        return np.array(found, bool)


def cut_at_stop(text: str, strings: Sequence[str], include: bool) -> str:
    """The text up to the stop string that is whole first (the first of `strings` among equals), with or without it."""
    found = [(place + len(string), order) for order, string in enumerate(strings) if (place := text.find(string)) >= 0]
    if not found:
        return text
    end, order = min(found)
    return text[: end if include else end - len(strings[order])]
