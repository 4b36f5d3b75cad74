"""The tokens of what an environment answers, to be appended to the very tokens that the model made.

The past of a rollout is never rendered again: a template may write it otherwise (Qwen3 leaves out what was thought), and a
tokenizer may cut the same text otherwise. What a template writes after a turn of the model is found in a short conversation
instead: the turn's end, the new messages, and the opening of the model's next turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError
from pods_cluster.data.tokenizer import PromptTokenizer, resolve_chat_template
from pods_cluster.environments.environment import Message

_SAID = "pods-said-so"
"""Stands for a turn of the model; a template writes it as it is."""


class TurnTokens:
    """Turns messages into the tokens that follow a turn of the model.

    Plain prompts (`data.chat: false`) have no roles: the text of the messages follows as it is. Raises DataError for a chat
    template that does not write a turn's end in the same way whether something follows or not.
    """

    def __init__(self, config: Config, tokenizer: PromptTokenizer, tools: Sequence[Any] = ()) -> None:
        self._tokenizer = tokenizer
        self._chat = config.data.chat
        self._template = resolve_chat_template(config.model.chat_template)
        self._variables: Mapping[str, Any] = config.model.chat_template_kwargs
        self._tools = list(tools) or None
        self._before: list[int] = []
        self._end: list[int] = []
        if self._chat:
            self._before = self._encode(_SAID)
            self._end = self._after(self._render([], opening=False))

    def check(self, role: str) -> None:
        """Refuse a template that does not take an answer of this role."""
        self([], [{"role": role, "content": "a"}])

    def __call__(self, made: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens to append after the `made` ones of a turn, which end with its end token if it has one."""
        if not self._chat:
            return self._encode("".join(message["content"] for message in messages))
        ids = self._after(self._render(messages, opening=True))
        if ids[: len(self._end)] != self._end:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"model.chat_template: the template ends a turn of the model otherwise when messages follow it (roles: "
                f"{roles}), so that they cannot be appended to the tokens that the model made; give a model.chat_template "
                f"that writes each message alike wherever it stands"
            )
        # The model wrote the turn's end itself, up to its last token; the rest of it (a newline, say) is the template's.
        written = self._end.index(made[-1]) + 1 if len(made) and made[-1] in self._end else 0
        return ids[written:]

    def _render(self, messages: Sequence[Message], *, opening: bool) -> str:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                talk,
                chat_template=self._template,
                add_generation_prompt=opening,
                tokenize=False,
                tools=self._tools,
                **self._variables,
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in talk)
            raise DataError(
                f"model.chat_template: the chat template refuses a conversation with the environment (roles: {roles}): "
                f"{error}; give another model.chat_template, or answer with messages of another role"
            ) from error
        return str(text)

    def _after(self, text: str) -> list[int]:
        """Return the tokens of what stands after the model's turn."""
        _, said, rest = text.partition(_SAID)
        if not said:
            raise DataError(
                "model.chat_template: the template leaves out what the model said, so nothing can follow it; "
                "give another model.chat_template"
            )
        ids = self._encode(_SAID + rest)
        if ids[: len(self._before)] != self._before:
            raise DataError(
                f"model.chat_template: the end of a turn ({rest[:20]!r}) cannot be told from its text by the tokenizer, so that "
                f"nothing can be appended to the tokens that the model made; end turns with a special token"
            )
        return ids[len(self._before) :]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
