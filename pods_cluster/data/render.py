"""Rendering of a row of the dataset to a `Prompt`: template, system message, chat template, token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pods_cluster.config import Config
from pods_cluster.data.errors import DataError, RowError
from pods_cluster.data.layout import Layout, Message
from pods_cluster.data.prompt_template import fill_template, resolve_template
from pods_cluster.data.tokenizer import PromptTokenizer, resolve_chat_template
from pods_cluster.types import Prompt

SURELY_LONG = 100
"""Characters a token: a text of more than that for each token that a prompt may have is tokenised in part."""

FirstPrompt = Callable[[Mapping[str, Any], int], "str | list[Message] | None"]
"""The prompt that an environment makes of a row, given the row and its number."""


class PromptRenderer:
    """Renders the rows of one dataset. What is wrong for every row is refused before the first.

    A text prompt is put into `data.template`; of chat messages the last user message is. `data.system` goes before
    a prompt that has no system message of its own. `Prompt.messages` is set only where the dataset's prompt was a list
    of messages: reward functions then see a conversation, as in TRL.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        tokenizer: PromptTokenizer,
        answers: Sequence[str | None] | None = None,
        tools: Sequence[Any] = (),
        first_prompt: FirstPrompt | None = None,
    ) -> None:
        """`answers` are the rows' answers as the file has them, given where a table would change them. `tools` are those of
        the run's environment, for rows without their own; `first_prompt` is what it makes of a row.

        Raises DataError: no such template, or a chat without a chat template.
        """
        self.layout = layout
        self.answers = answers
        self.tools = list(tools) or None
        self.first_prompt = first_prompt
        self.tokenizer = tokenizer
        self.template = resolve_template(config.data.template)
        self.system = config.data.system
        self.chat = config.data.chat
        self.chat_template = resolve_chat_template(config.model.chat_template)
        self.template_kwargs = config.model.chat_template_kwargs
        self.longest = config.data.max_prompt_tokens
        if self.chat and self.chat_template is None and not tokenizer.chat_template:
            raise DataError(
                f"data.chat: true, but the tokenizer of {config.model.path!r} has no chat template; "
                f"set data.chat: false for a base model, or give model.chat_template"
            )

    def __call__(self, epoch: int, index: int, row: Mapping[str, Any]) -> Prompt:
        """Render row `index`. Raises RowError when it has no prompt, the chat template refuses it, or it has no tokens."""
        source = self._source(row, index)
        messages = self._messages(source)
        if self.chat:
            text = self._render_chat(messages, index, self.layout.tools_of(row, index) or self.tools)
            ids = self._encode_chat(text, index)
        else:
            text = self._render_plain(messages, index)
            ids = self._encode_plain(text, index)
        if not ids:
            if text.strip():
                raise RowError(
                    f"model.path: the tokenizer makes no token of the prompt of row {index} ({text.strip()[:40]!r}); "
                    f"are its files whole (tokenizer.json)?"
                )
            raise RowError(f"data.prompt: row {index} renders to no token; correct or remove the row")
        return Prompt(
            epoch=epoch,
            row=index,
            text=text,
            token_ids=ids,
            messages=() if isinstance(source, str) else tuple(messages),
            answer=self._answer(row, index),
            columns=self.layout.columns_of(row),
        )

    def _source(self, row: Mapping[str, Any], index: int) -> str | list[Message]:
        """The prompt of the environment, where it makes one of this row, else the row's own."""
        if self.first_prompt is not None:
            made = self.first_prompt(self.layout.columns_of(row) | {"answer": self._answer(row, index)}, index)
            if made:
                return made
        return self.layout.prompt_of(row, index)

    def _answer(self, row: Mapping[str, Any], index: int) -> str | None:
        return self.layout.answer_of(row) if self.answers is None else self.answers[index]

    def _messages(self, source: str | list[Message]) -> list[Message]:
        """Return the conversation with template and system message."""
        if isinstance(source, str):
            messages = [{"role": "user", "content": fill_template(self.template, source)}]
        else:
            messages = list(source)
            last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is not None:
                messages[last] = messages[last] | {"content": fill_template(self.template, messages[last]["content"])}
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _render_chat(self, messages: list[Message], index: int, tools: list[Any] | None) -> str:
        # A conversation that ends with the assistant is one to be continued, not answered.
        continued = messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=False,
                tools=tools,
                **self.template_kwargs,
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RowError(
                f"data.chat: the chat template refuses the prompt of row {index} (roles: {roles}): {error}; "
                f"change the messages{' or data.system' if self.system else ''}, or give another model.chat_template"
            ) from error
        return str(text)

    def _encode_chat(self, text: str, index: int) -> tuple[int, ...]:
        """Encode a rendered chat. The template has written every special token itself, so none is added."""
        ids = self._encode(text, index, add_special_tokens=False)
        if self._starts_twice(ids):
            raise RowError(
                f"model.chat_template: the prompt of row {index} starts with two start tokens ({text[:40]!r}…); "
                f"the chat template writes one, so remove the other from it, from the row, or from data.template"
            )
        return ids

    def _render_plain(self, messages: list[Message], index: int) -> str:
        """Join the texts by blank lines: a plain prompt has no roles."""
        roles = [message["role"] for message in messages]
        if not set(roles) <= {"system", "user"} or roles.count("user") != 1:
            raise RowError(
                f"data.chat: false, but the prompt of row {index} is a conversation (roles: {', '.join(roles)}) that "
                f"has no plain form; set data.chat: true, or name a column with text"
            )
        return "\n\n".join(message["content"] for message in messages)

    def _encode_plain(self, text: str, index: int) -> tuple[int, ...]:
        """Encode as the tokenizer does, with its special tokens; a start token in the text is not doubled."""
        ids = self._encode(text, index, add_special_tokens=True)
        return ids[1:] if self._starts_twice(ids) else ids

    def _encode(self, text: str, index: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Encode a text. Of one that is much longer than a prompt may be (a row of megabytes takes a tokenizer many seconds) only
        the beginning, where that alone is too long already. Raises RowError for what the tokenizer has no token for."""
        most = SURELY_LONG * (self.longest + 1)
        try:
            if len(text) > most:
                ids = tuple(self.tokenizer.encode(text[:most], add_special_tokens=add_special_tokens))
                if len(ids) > 2 * self.longest:
                    return ids
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # tokenizers raises bare Exception
            raise RowError(
                f"model.path: the tokenizer cannot read the prompt of row {index} ({text.strip()[:40]!r}): {error}; correct "
                f"or remove the row, or are the tokenizer's files whole?"
            ) from error

    def _starts_twice(self, ids: tuple[int, ...]) -> bool:
        start = self.tokenizer.bos_token_id
        return start is not None and len(ids) > 1 and ids[0] == ids[1] == start
