"""Paths in a configuration: what could be no file's path on any machine is refused with its field, what could be is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_cluster.config import ConfigError, build_config
from pods_cluster.config.base import usable_path
from tests.law import law

BASE: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "rows.jsonl", "eval": {"path": "test.jsonl"}, "mix": [{"path": "more.jsonl"}]},
    "reward": [{"name": "exact_match"}],
    "environment": {"name": "env.py:Game"},
    "learner": {"kl": {"coefficient": 0.1, "reference": "reference"}},
    "run": {"name": "paths", "dir": "runs"},
}
FIELDS = ["model.path", "model.chat_template", "data.path", "data.template", "data.eval.path", "data.mix.0.path",
          "reward.0.name", "environment.name", "learner.kl.reference", "run.dir"]  # fmt: skip
WRONG = {
    "$HOME/x.py:f": "write the path out",
    "${SCRATCH}/x": "write the path out",
    "a/$USER": "write the path out",
    "~nobody_of_this_name/x": "write the path out",
    "a" * 300: "shorten it",
    "ä" * 200: "shorten it",
    "a/" * 3000: "shorten it",
    " ": "give a path",
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: value[:12])
def test_what_is_no_path_is_refused_by_field(field: str, value: str) -> None:
    tree = copy.deepcopy(BASE)
    *parents, last = field.split(".")
    node: Any = tree
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = value
    with pytest.raises(ConfigError) as refused:
        build_config(tree)
    assert f"{field}: {value[:10]!r}"[:-1] in str(refused.value)
    assert WRONG[value] in str(refused.value)


@given(st.text(st.characters(exclude_characters="\0$", exclude_categories=["Cs"]), min_size=1, max_size=60))
@law(200)
def test_any_other_text_is_kept(text: str) -> None:
    """Also brackets, blanks inside, other scripts and dots."""
    if text.strip() and not text.startswith("~"):
        assert usable_path(text) == text


@pytest.mark.parametrize(
    "value", ["~/x", "a b", "Price: 5$", "{{ messages }} $x", "line\n$HOME", "./[x]/*", "openai/gsm8k", None]
)
def test_what_may_be_meant_is_kept(value: str | None) -> None:
    assert usable_path(value) == value


def test_a_dollar_in_a_name_that_is_there_is_no_variable(tmp_path: Path) -> None:
    (tmp_path / "$mine").mkdir()
    assert usable_path(f"{tmp_path}/$mine/rows.jsonl") == f"{tmp_path}/$mine/rows.jsonl"
    with pytest.raises(ValueError, match="holds a variable"):
        usable_path(f"{tmp_path}/$yours/rows.jsonl")


def test_a_runs_name_is_as_short_as_a_folders() -> None:
    with pytest.raises(ConfigError, match=r"run\.name: 'a+…' has 300 characters; give at most 200"):
        build_config({**BASE, "run": {"name": "a" * 300}})
