"""Declaring rewards: what is refused, and that the error says where and how to mend it."""

import sys

import pytest

from pods_cluster.scoring import RewardConfigError, RewardSpec, ScoreRequest, check_rewards
from pods_cluster.scoring.reward_registry import load_reward

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


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (RewardSpec("math_anser"), ["reward[0].name", "'math_anser'", "did you mean 'math_answer'"]),
        (RewardSpec(""), ["reward[0].name"]),
        (RewardSpec("math_answer", weight=float("nan")), ["reward[0].weight", "nan"]),
        (RewardSpec("math_answer", timeout_s=0), ["reward[0].timeout_s", "0"]),
        (RewardSpec("math_answer", batch=0), ["reward[0].batch"]),
        (RewardSpec("math_answer", style="openai"), ["reward[0].style", "trl"]),  # type: ignore[arg-type]
        (RewardSpec("math_answer", none="zero"), ["reward[0].none", "skip"]),  # type: ignore[arg-type]
        (RewardSpec("m:f", range=(1.0, 0.0)), ["reward[0].range"]),
        (RewardSpec("m:f", range=(0.0, float("inf"))), ["reward[0].range"]),
        (RewardSpec("math_answer", options={"were": "boxed"}), ["reward[0].options.were", "where"]),
        (RewardSpec("soft_overlong", options={"max_tokens": 5}), ["reward[0].options.soft_tokens"]),
        (RewardSpec("math_answer", weight=0.0), ["reward[0].weight"]),
    ],
)
def test_a_bad_declaration_is_refused_by_field_value_and_fix(spec, parts):
    with pytest.raises(RewardConfigError) as refused:
        check_rewards([spec])
    for part in parts:
        assert part in str(refused.value)


def test_no_reward_and_two_of_one_name_are_refused():
    with pytest.raises(RewardConfigError, match="reward = "):
        check_rewards([])
    with pytest.raises(RewardConfigError, match=r"reward\[1\]\.name.*label"):
        check_rewards([RewardSpec("a:score"), RewardSpec("b:score")])
    check_rewards([RewardSpec("a:score"), RewardSpec("b:score", label="other")])


def test_a_reward_that_needs_the_answer_needs_an_answer_column():
    with pytest.raises(RewardConfigError, match=r"data\.answer"):
        check_rewards([RewardSpec("exact_match")], columns=["question"])
    check_rewards([RewardSpec("exact_match")], columns=["question", "answer"])
    check_rewards([RewardSpec("tag_count")], columns=["question"])


def test_checking_imports_no_user_code(tmp_path):
    check_rewards([RewardSpec(f"{tmp_path}/not_there.py:f"), RewardSpec("no_such_module:g")])


def test_trl_function_gets_columns_as_lists(user):
    call = load_reward(RewardSpec(f"{user}:trl"), 0, ["target"])
    rows = [ScoreRequest("p", "a", columns={"target": "a"}), ScoreRequest("p", "b", columns={"target": "a"})]
    assert call(rows) == [1.0, 0.0]


def test_trl_function_gets_messages_for_a_chat_and_text_otherwise(user):
    chat = ScoreRequest("<user>hi", "four", messages=[{"role": "user", "content": "hi"}])
    assert load_reward(RewardSpec(f"{user}:trl_chat"), 0)([chat]) == [4.0]
    assert load_reward(RewardSpec(f"{user}:trl_text"), 0)([ScoreRequest("hi", "four")]) == [4.0]
    assert load_reward(RewardSpec(f"{user}:trl_text", completions="text"), 0)([chat]) == [4.0]
    assert load_reward(RewardSpec(f"{user}:trl_chat", completions="messages"), 0)([ScoreRequest("hi", "four")]) == [4.0]


def test_async_function_and_options(user):
    call = load_reward(RewardSpec(f"{user}:trl_async", options={"scale": 2.0}), 0)
    assert call([ScoreRequest("p", "abc")]) == [6.0]
    assert call([ScoreRequest("p", "abcd")]) == [8.0]


def test_verl_function_gets_the_row_as_it_is(user):
    columns = {"data_source": "mine", "reward_model": {"ground_truth": {"value": "7"}}, "extra_info": {"index": 3}}
    call = load_reward(RewardSpec(f"{user}:compute_score"), 0)
    assert call([ScoreRequest("p", "7", columns=columns), ScoreRequest("p", "8", columns=columns)]) == [1.0, 0.0]
    assert load_reward(RewardSpec(f"{user}:short_verl"), 0)([ScoreRequest("p", "7", answer="7")]) == [True]


def test_function_by_module_name(user, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert load_reward(RewardSpec("my_rewards:trl_text"), 0)([ScoreRequest("p", "ab")]) == [2.0]
    finally:
        sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("name", "columns", "parts"),
    [
        ("neither", None, ["reward[2].style", "solution_str", "completions"]),
        ("trl", ["question"], ["reward[2].name", "target", "question"]),
        ("trl_txt", None, ["reward[2].name", "trl_text"]),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(user, name, columns, parts):
    with pytest.raises(RewardConfigError) as refused:
        load_reward(RewardSpec(f"{user}:{name}"), 2, columns)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("source", ["no_such_module_at_all", "no/such/file.py"])
def test_an_import_that_fails_is_named(source):
    with pytest.raises(RewardConfigError, match=r"reward\[0\]\.name.*no.such"):
        load_reward(RewardSpec(f"{source}:f"), 0)
