"""The ready environment of tools: calls are found, made, and answered; what a model gets wrong is told to it."""

from __future__ import annotations

import pytest

from pods_cluster.environments import ToolEnvironment
from pods_cluster.environments.environment import as_messages


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def look_up(word: str) -> dict[str, str]:
    """Look a word up.

    Args:
        word: The word.
    """
    return {"word": word}


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_each_call_is_answered_in_its_order_and_a_turn_without_one_is_the_last() -> None:
    environment = ToolEnvironment([add, look_up])
    turn = "Let me see. " + calling("add", '{"a": 2, "b": 3}') + calling("look_up", '{"word": "é"}')
    assert environment.step(turn) == [
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "tool", "content": '{"word": "é"}', "name": "look_up"},
    ]
    assert environment.step("The answer is 5.") is None
    assert environment.reward() is None


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("<tool_call>{oops}</tool_call>", "Error: the call is no JSON"),
        (calling("divide", "{}"), "Error: there is no tool 'divide'; there is add"),
        (calling("add", '{"a": 1}'), "Error: missing a required argument: 'b'"),
        (calling("add", "[1, 2]"), "Error: arguments is no object"),
        (calling("add", '{"a": 1, "b": "x"}'), "Error: TypeError: unsupported operand"),
        ("<tool_call>7</tool_call>", "Error: there is no tool None"),
    ],
)
def test_what_a_model_gets_wrong_is_told_to_it(call: str, told: str) -> None:
    (message,) = ToolEnvironment([add]).step(call) or []
    assert message["role"] == "tool"
    assert message["content"].startswith(told)


def test_a_tool_that_fails_may_end_the_rollout_instead() -> None:
    with pytest.raises(TypeError):
        ToolEnvironment([add], tell_errors=False).step(calling("add", '{"a": 1, "b": "x"}'))


def test_tools_are_named_as_rewards_are() -> None:
    environment = ToolEnvironment([f"{__file__}:add"])
    assert [tool.__name__ for tool in environment.tools()] == ["add"]
    assert environment.step(calling("add", '{"a": 2, "b": 2}')) == [{"role": "tool", "content": "4", "name": "add"}]


def test_answers_become_messages() -> None:
    assert as_messages("go on", "user") == [{"role": "user", "content": "go on"}]
    assert as_messages({"role": "tool", "content": "x"}, "user") == [{"role": "tool", "content": "x"}]
    assert as_messages([], "user") == as_messages(None, "user") == []
    for wrong in (5, [5], [{"role": "user"}], {"role": "user", "content": 3}):
        with pytest.raises(TypeError, match="returned"):
            as_messages(wrong, "user")
