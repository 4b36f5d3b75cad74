"""The look at rewards before a run: what is refused, what is only told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.config import RewardConfigError, ScoringConfig
from pods_cluster.scoring import ScoreRequest
from pods_cluster.scoring.reward_probe import probe_rewards
from tests.scoring.support import reward

USER = """
import functools, os

def level(completions, answer, level, **kwargs):
    return [1.0] * len(completions)

def reads_level(completions, **kwargs):
    return [float(level) for level in kwargs["level"]]

async def awaits_level(completions, **kwargs):
    return [float(kwargs["level"][at]) for at in range(len(completions))]

def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@logged
def decorated(completions, **kwargs):
    return [float(kwargs["level"][0])] * len(completions)

def looks_up(completions, **kwargs):
    return [{"right": 1.0}[completions[0]]] * len(completions)

def raises(completions, **kwargs):
    print("thinking")
    raise ValueError("cannot parse")

def dies(completions, **kwargs):
    os._exit(3)

def skips(completions, **kwargs):
    return [None] * len(completions)

def length(completions, completion_ids, answer, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["level"]

def verl_level(data_source, solution_str, ground_truth, level):
    return 1.0
"""
SCORING = ScoringConfig()
PLAIN = ScoreRequest("p", "42", "42", columns={"answer": "42"}, completion_ids=(4, 2))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "user.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("level", "needs the column level, which the rows do not have; they have answer"),
        (
            "reads_level",
            r"needs the column 'level', which the rows do not have \(user.py:8 in reads_level\); they have",
        ),
        ("awaits_level", r"needs the column 'level', which the rows do not have \(user.py:11 in "),
        ("decorated", r"needs the column 'level', which the rows do not have \(user.py:21 in decorated\)"),
        ("verl", "needs the column 'extra_info', which the rows do not have"),
        ("verl_level", "takes the argument level, which verl's convention does not give"),
        ("nope", "has no function 'nope'"),
    ],
)
def test_a_column_or_argument_that_is_not_there_is_refused(user: Path, function: str, says: str):
    rewards = [reward("exact_match"), reward(f"{user}:{function}")]
    with pytest.raises(RewardConfigError, match=says) as refused:
        probe_rewards(rewards, SCORING, {"answer"}, PLAIN)
    assert str(refused.value).startswith(f"reward.1.name: '{user}:{function}'")


def test_a_key_that_the_first_rows_extra_info_lacks_is_refused(user: Path):
    request = ScoreRequest("p", "c", "1", columns={"extra_info": {"split": "train"}})
    with pytest.raises(RewardConfigError, match="needs 'level' in the column 'extra_info'"):
        probe_rewards([reward(f"{user}:verl")], SCORING, {"extra_info"}, request)


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(RewardConfigError, match="importing no_such_module failed: ModuleNotFoundError"):
        probe_rewards([reward("no_such_module:f")], SCORING)


def test_what_a_reward_refuses_is_told_with_its_place(user: Path):
    names = ("raises", "looks_up", "dies", "skips", "length")
    rewards = [reward(f"{user}:{name}", none="skip" if name == "skips" else "missing") for name in names]
    probe = probe_rewards(rewards, SCORING, {"answer"}, PLAIN)
    problems = {trial.reward: trial.problem for trial in probe.trials}
    assert problems == {
        "raises": "error: ValueError: cannot parse (user.py:28 in raises)",
        "looks_up": "error: KeyError: '42' (user.py:24 in looks_up)",
        "dies": "died: its process ended with exit code 3",
        "skips": None,
        "length": None,
    }
    assert {trial.reward: trial.value for trial in probe.trials}["length"] == 2.0
    assert [(line.reward, line.text) for line in probe.printed.lines] == [("raises", "thinking")]


def test_without_a_completion_rewards_are_imported_alone(user: Path):
    assert probe_rewards([reward(f"{user}:dies")], SCORING).trials == ()
