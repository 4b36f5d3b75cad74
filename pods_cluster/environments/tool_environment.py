"""The ready environment that calls tools: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in, tool messages out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pods_cluster.environments.environment import Environment, Message
from pods_cluster.scoring.calling import awaited
from pods_cluster.scoring.reward_registry import load_object

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ToolEnvironment(Environment):
    """Calls the tools that the model asks for; a turn without a call is the last one.

    `tools` are functions, or their names as `file.py:function` or `package.module:function` (so they stand in YAML). A
    subclass may give its own methods instead: override `tools`. Names, type hints and docstring (with `Args:`) become the
    JSON schema that the chat template writes into the prompt. A call that is malformed or raises is answered with the error,
    which the model may learn from; with `tell_errors: false` an error of a tool ends the rollout as a failure instead.
    """

    role: ClassVar[str] = "tool"

    def __init__(self, tools: Sequence[Callable[..., Any] | str] = (), tell_errors: bool = True) -> None:
        self._tools = [load_object(tool) if isinstance(tool, str) else tool for tool in tools]
        self._tell_errors = tell_errors

    def tools(self) -> Sequence[Callable[..., Any]]:
        return self._tools

    def step(self, completion: str) -> list[Message] | None:
        calls = _CALL.findall(completion)
        return [self._answer(text) for text in calls] if calls else None

    def _answer(self, text: str) -> Message:
        try:
            call = json.loads(text)
        except ValueError as error:
            return _message(f"Error: the call is no JSON ({error})")
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, {})
        by_name = {tool.__name__: tool for tool in self.tools()}
        if not isinstance(name, str) or name not in by_name:
            return _message(f"Error: there is no tool {name!r}; there is {', '.join(by_name)}")
        tool = by_name[name]
        if not isinstance(arguments, Mapping):
            return _message("Error: arguments is no object", name)
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return _message(f"Error: {error}", name)
        try:
            result = awaited(tool(**arguments))
        except Exception as error:
            if not self._tell_errors:
                raise
            return _message(f"Error: {type(error).__name__}: {error}", name)
        return _message(
            result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), name
        )


def _message(content: str, name: str | None = None) -> Message:
    return {"role": "tool", "content": content} | ({} if name is None else {"name": name})
