"""Rules by name, rules from a user's module, and what a rule may return."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from pods_cluster.selection.rule_registry import (
    RuleError,
    RuleOptionsError,
    UnknownRuleError,
    known_rules,
    register_rule,
    resolve,
)
from pods_cluster.selection.select import select
from pods_cluster.types import Fate, GroupId

GROUP = GroupId(0, 1)


@pytest.fixture
def user_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rulebook" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "rulebook" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(
        textwrap.dedent(
            """
            import numpy as np

            def shortest(rewards, m, rng, context, longest_first=False):
                order = np.argsort(context.lengths, kind="stable")
                return (order[::-1] if longest_first else order)[:m]

            def worst(rewards, m, rng, context):
                rewards.sort()
                return []

            def bare(rewards):
                return []

            def raising(rewards, m, rng, context):
                raise KeyError("length")

            number = 3
            """
        )
    )
    (tmp_path / "rulebook" / "broken.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "rulebook" / "failing.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_rule_of_a_users_package_is_called_with_context_and_options(user_rules: None) -> None:
    rewards = np.array([np.nan, 0.0, 1.0, 0.5, 0.2])
    lengths = np.array([1, 50, 10, 40, 20], dtype=np.int32)
    short = select(rewards, 2, resolve("rulebook.sub.mine:shortest"), 0, GROUP, lengths=lengths)
    assert short.kept.tolist() == [2, 4]  # index 0 has no valid reward
    long = resolve("rulebook.sub.mine:shortest", {"longest_first": True})
    assert select(rewards, 2, long, 0, GROUP, lengths=lengths).kept.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "max_varience",
            ["selector.rule", "'max_varience'", "did you mean 'max_variance'", "percentile", "package.module"],
        ),
        ("zzz", ["selector.rule", "'zzz'", "max_variance"]),
        ("", ["selector.rule", "max_variance"]),
        (":shortest", ["selector.rule", "package.module:function"]),
        ("rulebook.sub.mine:", ["selector.rule", "package.module:function"]),
        ("no_such_module:rule", ["selector.rule", "no_such_module", "PYTHONPATH"]),
        ("rulebook.nothing:rule", ["selector.rule", "rulebook.nothing", "PYTHONPATH"]),
        ("rulebook.broken:rule", ["selector.rule", "a_module_that_is_not_there"]),
        ("rulebook.failing:rule", ["selector.rule", "ZeroDivisionError"]),
        ("rulebook.sub.mine:shortst", ["selector.rule", "does not exist", "did you mean 'rulebook.sub.mine:shortest'"]),
        ("rulebook.sub.mine:number", ["selector.rule", "is not a function"]),
        ("rulebook.sub.mine:bare", ["selector.rule", "(rewards, m, rng, context"]),
    ],
)
def test_a_rule_that_cannot_be_resolved_is_explained(user_rules: None, name: str, words: list[str]) -> None:
    with pytest.raises(UnknownRuleError) as caught:
        resolve(name)
    for word in words:
        assert word in str(caught.value)


def test_options_that_do_not_fit_are_refused(user_rules: None) -> None:
    with pytest.raises(RuleOptionsError, match=r"selector\.options.*'max_variance'.*no options"):
        resolve("max_variance", {"weight": 1})
    with pytest.raises(RuleOptionsError, match="longest_first"):
        resolve("rulebook.sub.mine:shortest", {"longest": True})


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ([0, 0], "twice"),
        ([0], "shape"),
        ([0, 1, 2], "shape"),
        ([0, 9], "out of range"),
        ([-1, 0], "out of range"),
        ([0.0, 1.0], "type"),
        ([True, False], "type"),
        (None, "not a list"),
        (5, "not a list"),
        ([[0, 1]], "shape"),
    ],
)
def test_what_a_rule_returns_is_checked(returned, why: str) -> None:
    register_rule("test_returns", replace=True)(lambda rewards, m, rng, context: returned)
    with pytest.raises(RuleError) as caught:
        select([0.0, 1.0, 0.5, 0.7], 2, "test_returns", 0, GROUP)
    for word in ("selector.rule", "'test_returns'", repr(returned), why, "2 distinct integers in 0..3", "0.1.0"):
        assert word in str(caught.value)


def test_a_rule_that_raises_is_named_with_its_cause(user_rules: None) -> None:
    with pytest.raises(RuleError, match=r"'rulebook.sub.mine:raising' failed on group 0\.1\.0 .*KeyError"):
        select([0.0, 1.0, 0.5], 2, "rulebook.sub.mine:raising", 0, GROUP)


def test_a_rule_that_sorts_in_place_does_not_touch_the_group(user_rules: None) -> None:
    rewards = np.array([3.0, 1.0, 2.0])
    with pytest.raises(RuleError):
        select(rewards, 2, "rulebook.sub.mine:worst", 0, GROUP)
    assert rewards.tolist() == [3.0, 1.0, 2.0]


def test_registered_rules_are_found_and_names_are_not_taken_twice() -> None:
    @register_rule("test_first_ones", replace=True)
    def first_ones(rewards, m, rng, context):
        return range(m)

    assert "test_first_ones" in known_rules()
    assert select([5.0, 1.0, 2.0], 2, "test_first_ones", 0, GROUP).kept.tolist() == [0, 1]
    with pytest.raises(ValueError, match="taken"):
        register_rule("max_variance")(first_ones)
    with pytest.raises(ValueError, match="without ':'"):
        register_rule("a:b")(first_ones)


def test_only_max_variance_states_a_settled_condition() -> None:
    assert resolve("max_variance").settled is not None
    assert [name for name in ("max_reward", "min_reward", "random", "percentile") if resolve(name).settled] == []


def test_a_user_rule_is_not_called_where_there_is_no_choice() -> None:
    register_rule("test_never", replace=True)(lambda rewards, m, rng, context: 1 / 0)
    outcome = select([1.0, 0.0], 2, "test_never", 0, GROUP)
    assert outcome.kept.tolist() == [0, 1]
    assert outcome.fate is not Fate.NO_SIGNAL
