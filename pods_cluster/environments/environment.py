"""The protocol of an environment: what a user's class implements to answer the model between its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar

Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else the chat template reads (`name`, `tool_call_id`)."""
Answer = str | Message | list[Message] | None
"""Return value of `step`: a text, messages, or None, which ends the rollout."""


class Environment:
    """Answers the model in one rollout. Override `step`, and of the others what is needed; any of them may be async.

    An instance is made for each rollout with `environment.options`, in a process of its own: it may keep state, block, and
    start processes. What it raises ends its rollout without a reward, counted as a failure.
    """

    role: ClassVar[str] = "user"
    """Role of the message that a text returned by `step` becomes."""

    def tools(self) -> Sequence[Any]:
        """Return what the model may call, for the chat template: functions with type hints and a docstring, or JSON schemas."""
        return ()

    def first_prompt(self, row: Mapping[str, Any]) -> str | list[Message] | None:  # noqa: ARG002
        """Return the prompt of a dataset's row: a text, chat messages, or None for the row's own.

        It is called on an instance of its own, once for all rollouts of a group. `row` has the dataset's columns.
        """
        return None

    def reset(self, row: Mapping[str, Any]) -> Awaitable[None] | None:
        """Begin a rollout. `row` has the dataset's columns, and its `answer`. Called before the first `step`."""

    def step(self, completion: str) -> Answer | Awaitable[Answer]:
        """Return the answer to what the model wrote in its turn: a text or messages; None ends the rollout."""
        raise NotImplementedError

    def reward(self) -> float | Awaitable[float | None] | None:
        """Return the rollout's reward after its last turn; None: it gives none. It is the reward `environment`."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Free what the rollout held. Called at its end, but not where the process was killed."""


def as_messages(answer: Any, role: str) -> list[Message]:
    """Return an answer of `step` as messages; none where it ends the rollout. Raises TypeError for what is no answer."""
    if answer is None:
        return []
    if isinstance(answer, str):
        return [{"role": role, "content": answer}]
    messages = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise TypeError(f"returned a {type(answer).__name__}, expected a text, messages or None")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"returned {str(message)[:80]!r} as a message; one is a dict with role and content")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"returned a message of role {message['role']!r} whose content is no text")
    return [dict(message) for message in messages]
