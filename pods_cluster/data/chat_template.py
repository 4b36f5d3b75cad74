"""Rendering of chat templates with jinja2 alone, by the rules of Hugging Face tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Put behind a final message that the model is to continue; the text is cut there, so that no end-of-turn follows.
_CUT = "\x00continue-here\x00"


class ChatTemplateError(ValueError):
    """A chat template that is not valid, or that refuses the conversation."""


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant tokens for training; for a prompt it is transparent."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation by a template. `special_tokens` are bos_token, eos_token, … as texts; `tools` is what the
    model may call, as JSON-able objects; `variables` are others that the template reads.

    Raises ChatTemplateError: a syntax error, or a template's own refusal (roles that it does not take).
    """
    chat = [dict(message) for message in messages]
    if continue_final_message:
        chat[-1]["content"] = chat[-1]["content"] + _CUT
    try:
        text = _compile(template).render(
            **{
                **special_tokens,
                "documents": None,
                **(variables or {}),
                "messages": chat,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ChatTemplateError(str(error)) from error
    if not continue_final_message:
        return text
    head, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise ChatTemplateError("the template leaves out the final message, so it cannot be continued")
    return head


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
