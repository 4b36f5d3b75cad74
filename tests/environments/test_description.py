"""What a run asks of its environment before it starts: tools, prompts of rows, a turn. Classes of Python travel by value."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pods_cluster.api.environments import tool_section
from pods_cluster.api.train import configure
from pods_cluster.config import Config, ConfigError
from pods_cluster.data.errors import RowError
from pods_cluster.environments import Environment
from pods_cluster.environments.description import EnvironmentDesk
from pods_cluster.environments.host import EnvironmentFailed, EnvironmentStartError

ROWS = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def configured(tmp_path: Path, **environment: Any) -> Config:
    settings = {"run": {"dir": str(tmp_path), "steps": 1, "name": "desk"}, "generator.engine": "transformers"}
    return configure("model", ROWS, environment=environment, **settings)


def test_a_class_of_a_script_travels_and_makes_prompts_and_rewards(tmp_path: Path) -> None:
    bonus = 0.25

    class Twice(Environment):
        """Asks once more."""

        def first_prompt(self, row: Any) -> str:
            if row["answer"] is None:
                raise ValueError("no answer")
            return f"answer {row['answer']}"

        def step(self, completion: str) -> str | None:
            return None if completion == "sure" else "sure?"

        def reward(self) -> float:
            return bonus

    config = configured(tmp_path, name=Twice, max_turns=3)
    assert config.environment is not None
    assert (config.environment.max_turns, config.environment.name.endswith("Twice")) == (3, True)
    assert [reward.name for reward in config.reward] == ["environment"], (
        "what it gives is the reward where none is named"
    )
    desk = EnvironmentDesk(config)
    try:
        assert desk.description.prompts
        assert desk.first_prompt({"answer": "4"}, 0) == "answer 4"
        with pytest.raises(RowError, match="row 7 has no prompt: error: first_prompt"):
            desk.first_prompt({"answer": None}, 7)
        assert desk.play({"answer": "4"}, "what") == ([{"role": "user", "content": "sure?"}], 0.25)
        assert desk.play({"answer": "4"}, "sure") == ([], 0.25)
    finally:
        desk.close()


def test_functions_are_tools_with_their_schemas(tmp_path: Path) -> None:
    desk = EnvironmentDesk(configured(tmp_path, **tool_section([add])))
    try:
        assert desk.description.role == "tool"
        (schema,) = desk.description.tools
        assert schema["function"]["name"] == "add"
        assert schema["function"]["parameters"]["required"] == ["a", "b"]
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
        assert desk.play({"answer": "4"}, call)[0] == [{"role": "tool", "content": "4", "name": "add"}]
    finally:
        desk.close()


def undescribed(a, b):
    return a + b


def test_what_cannot_be_used_is_told_with_its_cause(tmp_path: Path) -> None:
    options = {"tools": [f"{__file__}:undescribed"]}
    config = configured(tmp_path, name="pods_cluster.environments:ToolEnvironment", options=options)
    with pytest.raises(EnvironmentStartError, match=r"environment\.name: .*undescribed.*no docstring"):
        EnvironmentDesk(config)
    with pytest.raises(ConfigError, match=r"environment\.name: 'Guess' names no class"):
        configured(tmp_path, name="Guess")
    with pytest.raises(ConfigError, match=r"environment\.turn_tokens: 4096 is more than generator\.max_tokens: 512"):
        configured(tmp_path, name="file.py:Guess", turn_tokens=4096)


def test_a_turn_and_a_prompt_have_the_environments_own_time(tmp_path: Path) -> None:
    """Not that of its import: one that hangs would hold up `pods check`, and a run's controller, for minutes."""

    class Hangs(Environment):
        def first_prompt(self, row: Any) -> str:
            return self.step("")

        def step(self, completion: str) -> str:
            time.sleep(600)
            return completion

    desk = EnvironmentDesk(configured(tmp_path, name=Hangs, timeout=0.5))
    try:
        with pytest.raises(
            RowError, match=r"row 3 has no prompt: timeout: first_prompt\(\) gave no answer within 0\.5 s"
        ):
            desk.first_prompt({"answer": "4"}, 3)
        with pytest.raises(EnvironmentFailed, match=r"step\(\) gave no answer within 0\.5 s \(environment\.timeout\)"):
            desk.play({"answer": "4"}, "5")
    finally:
        desk.close()
