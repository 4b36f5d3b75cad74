"""Declaring rewards: what is refused, and that the error says where and how to mend it."""

import ast
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import pods_cluster
from pods_cluster.config import Config, ConfigError, RewardConfig, RewardConfigError, build_config
from pods_cluster.scoring import ScoreRequest, ScorerPool, check_rewards
from pods_cluster.scoring.reward_registry import load_reward
from tests.scoring.support import reward

USER = """
def trl(prompts, completions, target, **kwargs):
    return [float(completion == t) for completion, t in zip(completions, target)]

def trl_chat(prompts, completions, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    return [float(len(completion[0]["content"])) for completion in completions]

def trl_text(prompts, completions):
    return [float(len(completion)) for completion in completions]

async def trl_async(prompts, completions, scale=1.0, **kwargs):
    import asyncio
    await asyncio.sleep(0)
    return [scale * len(completion) for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth["value"]), "source": data_source, "extra": extra_info["index"]}

def short_verl(solution_str, ground_truth):
    return solution_str == ground_truth

def neither(text, answer):
    return 1.0
"""


@pytest.fixture
def user(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(USER)
    return str(path)


def config_with(*rewards: dict[str, Any]) -> Config:
    sections = {"model": {"path": "some/model"}, "data": {"path": "rows.jsonl"}, "run": {"name": "test"}}
    return build_config({**sections, "reward": list(rewards)})


def resolves(where: str) -> bool:
    """Whether a field's path, as an error names it, leads to a field of the configuration's models."""
    at: Any = Config
    for part in where.split("."):
        if isinstance(at, type) and issubclass(at, BaseModel):
            if part not in at.model_fields:
                return False
            at = at.model_fields[part].annotation
        elif getattr(at, "__origin__", None) is list and part.isdigit():
            (at,) = get_args(at)
        elif getattr(at, "__origin__", None) is dict:
            at = object()  # what is under free-form options is the plug-in's
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"name": ""}, ["reward.0.name: ''"]),
        ({"name": "math_answer", "weight": float("nan")}, ["reward.0.weight: nan", "finite"]),
        ({"name": "math_answer", "timeout": 0}, ["reward.0.timeout: 0", "greater than 0"]),
        ({"name": "math_answer", "timeout_s": 5}, ["reward.0.timeout_s", "did you mean timeout?"]),
        ({"name": "math_answer", "batch": 0}, ["reward.0.batch: 0", "greater than or equal to 1"]),
        ({"name": "math_answer", "style": "openai"}, ["reward.0.style: 'openai'", "trl"]),
        ({"name": "math_answer", "none": "zero"}, ["reward.0.none: 'zero'", "skip"]),
        ({"name": "math_answer", "completions": "tokens"}, ["reward.0.completions: 'tokens'", "messages"]),
        ({"name": "m:f", "range": [1.0, 0.0]}, ["reward.0.range: [1.0, 0.0]", "swap"]),
        ({"name": "m:f", "range": [0.0, float("inf")]}, ["reward.0.range", "inf", "finite"]),
    ],
)
def test_a_bad_value_is_refused_by_field_value_and_fix(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config_with(fields)
    for part in parts:
        assert part in str(refused.value)


def load_errors(user: str) -> list[RewardConfigError]:
    """One of every error that checking, loading and starting rewards can raise, the reward not the first in the list."""
    errors = []

    def refused(function: Any, *arguments: Any) -> None:
        with pytest.raises(RewardConfigError) as error:
            function(*arguments)
        errors.append(error.value)

    good = reward("tag_count")
    refused(check_rewards, [])
    refused(check_rewards, [good, reward("a:score"), reward("b:score")])
    refused(check_rewards, [reward("math_answer", weight=0.0)])
    refused(check_rewards, [good, reward("math_anser")])
    refused(check_rewards, [good, reward("math_answer", options={"were": "boxed"})])
    refused(check_rewards, [good, reward("soft_overlong", options={"max_tokens": 5})])
    refused(check_rewards, [good, reward("math_answer", options={"where": "boxd"})])
    refused(check_rewards, [good, reward("exact_match")], ["question"])
    refused(load_reward, reward(f"{user}:neither"), 1)
    refused(load_reward, reward(f"{user}:trl"), 1, ["question"])
    refused(load_reward, reward(f"{user}:trl_txt"), 1)
    refused(load_reward, reward(f"{user}:trl_text", options={"scale": 2}), 1)
    refused(load_reward, reward("no_such_module_at_all:f"), 1)
    refused(ScorerPool, [good, reward(f"{user}:trl_txt")])
    return errors


def test_every_reward_error_names_a_field_that_the_yaml_has(user: str) -> None:
    for error in load_errors(user):
        assert str(error).startswith(f"{error.where}: ")
        assert resolves(error.where), error
        assert isinstance(error, ConfigError)


def test_every_place_that_raises_a_reward_error_names_a_field_of_a_reward() -> None:
    """Over the source of the whole package: no raise is left out because no test provokes it."""
    fields = []
    for path in Path(pods_cluster.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "reward[{" not in text, path
        for node in ast.walk(ast.parse(text)) if "RewardConfigError(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("RewardConfigError", "_refused"):
                index, field = node.args[:2]
                if isinstance(field, ast.Name):
                    assert path.name == "reward_registry.py", "`_refused` alone passes a field on"
                    continue
                if isinstance(index, ast.Constant) and index.value is None:
                    continue  # the whole list
                start = field.values[0] if isinstance(field, ast.JoinedStr) else field
                assert isinstance(start, ast.Constant), ast.dump(node)
                fields.append(str(start.value).split(".")[0])
    assert len(fields) >= 11
    assert set(fields) <= set(RewardConfig.model_fields)


def test_what_resolves_is_told_apart_from_what_does_not() -> None:
    assert all(map(resolves, ["reward", "reward.0.timeout", "reward.3.options.soft_tokens", "selector.keep"]))
    assert not any(
        map(resolves, ["reward[0].timeout", "reward.0.timeout_s", "reward.timeout", "rewards", "reward.0.a.b"])
    )


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (reward("math_anser"), ["reward.0.name: 'math_anser'", "did you mean 'math_answer'"]),
        (reward("math_answer", options={"were": "boxed"}), ["reward.0.options.were: 'boxed'", "where"]),
        (reward("soft_overlong", options={"max_tokens": 5}), ["reward.0.options.soft_tokens", "add it"]),
        (reward("math_answer", options={"where": "boxd"}), ["reward.0.options: {'where': 'boxd'}", "answer_tag"]),
        (
            reward("soft_overlong", options={"max_tokens": 5, "soft_tokens": 9}),
            ["reward.0.options", "soft_tokens: 9 must be from 1 to max_tokens: 5"],
        ),
        (reward("soft_overlong", options={"max_tokens": "5", "soft_tokens": 9}), ["reward.0.options", "soft_overlong"]),
        (reward("math_answer", weight=0.0), ["reward.0.weight: 0.0", "give one a weight"]),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_by_field_value_and_fix(entry: RewardConfig, parts: list[str]) -> None:
    with pytest.raises(RewardConfigError) as refused:
        check_rewards([entry])
    for part in parts:
        assert part in str(refused.value)


def test_rewards_without_a_sum_are_refused_by_the_configuration_and_by_the_pool() -> None:
    with pytest.raises(ConfigError, match=r"reward: \[\] is refused"):
        config_with()
    with pytest.raises(RewardConfigError, match=r"reward: \[\] names no reward; add one"):
        ScorerPool([])
    twice = r"reward\.1\.name: 'b:score' is called 'score'.* as reward\.0 is; give one of them another reward\.1\.label"
    with pytest.raises(ConfigError, match=twice):
        config_with({"name": "a:score"}, {"name": "b:score"})
    with pytest.raises(RewardConfigError, match=twice):
        ScorerPool([reward("a:score"), reward("b:score")])
    with pytest.raises(ConfigError, match=r"reward\.0\.weight: 0\.0 leaves no reward with a weight"):
        config_with({"name": "a:score", "weight": 0}, {"name": "math_answer", "weight": 0})
    check_rewards([reward("a:score"), reward("b:score", label="other")])
    assert [entry.key for entry in config_with({"name": "a:b:f"}, {"name": "m:g", "label": "h"}).reward] == ["f", "h"]


def test_a_reward_that_needs_the_answer_needs_an_answer_column():
    with pytest.raises(RewardConfigError, match=r"data\.answer"):
        check_rewards([reward("exact_match")], columns=["question"])
    check_rewards([reward("exact_match")], columns=["question", "answer"])
    check_rewards([reward("tag_count")], columns=["question"])


def test_checking_imports_no_user_code(tmp_path):
    check_rewards([reward(f"{tmp_path}/not_there.py:f"), reward("no_such_module:g")])


def test_trl_function_gets_columns_as_lists(user):
    call = load_reward(reward(f"{user}:trl"), 0, ["target"])
    rows = [ScoreRequest("p", "a", columns={"target": "a"}), ScoreRequest("p", "b", columns={"target": "a"})]
    assert call(rows) == [1.0, 0.0]


def test_trl_function_gets_messages_for_a_chat_and_text_otherwise(user):
    chat = ScoreRequest("<user>hi", "four", messages=[{"role": "user", "content": "hi"}])
    assert load_reward(reward(f"{user}:trl_chat"), 0)([chat]) == [4.0]
    assert load_reward(reward(f"{user}:trl_text"), 0)([ScoreRequest("hi", "four")]) == [4.0]
    assert load_reward(reward(f"{user}:trl_text", completions="text"), 0)([chat]) == [4.0]
    assert load_reward(reward(f"{user}:trl_chat", completions="messages"), 0)([ScoreRequest("hi", "four")]) == [4.0]


def test_async_function_and_options(user):
    call = load_reward(reward(f"{user}:trl_async", options={"scale": 2.0}), 0)
    assert call([ScoreRequest("p", "abc")]) == [6.0]
    assert call([ScoreRequest("p", "abcd")]) == [8.0]


def test_verl_function_gets_the_row_as_it_is(user):
    columns = {"data_source": "mine", "reward_model": {"ground_truth": {"value": "7"}}, "extra_info": {"index": 3}}
    call = load_reward(reward(f"{user}:compute_score"), 0)
    assert call([ScoreRequest("p", "7", columns=columns), ScoreRequest("p", "8", columns=columns)]) == [1.0, 0.0]
    assert load_reward(reward(f"{user}:short_verl"), 0)([ScoreRequest("p", "7", answer="7")]) == [True]


def test_function_by_module_name(user, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert load_reward(reward("my_rewards:trl_text"), 0)([ScoreRequest("p", "ab")]) == [2.0]
    finally:
        sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("name", "columns", "parts"),
    [
        ("neither", None, ["reward.2.style", "solution_str", "completions"]),
        ("trl", ["question"], ["reward.2.name", "target", "question"]),
        ("trl_txt", None, ["reward.2.name", "trl_text"]),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(user, name, columns, parts):
    with pytest.raises(RewardConfigError) as refused:
        load_reward(reward(f"{user}:{name}"), 2, columns)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("source", ["no_such_module_at_all", "no/such/file.py"])
def test_an_import_that_fails_is_named(source):
    with pytest.raises(RewardConfigError, match=r"reward\.0\.name.*no.such"):
        load_reward(reward(f"{source}:f"), 0)
