"""Settings of runs by their path, as in `learner.workers`, and those in which runs differ (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OWN = frozenset({"run.name", "run.dir"})
"""Settings that tell runs apart and say nothing about them."""


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted path; lists are values."""
    if isinstance(tree, Mapping):
        return {
            name: value
            for key, branch in tree.items()
            for name, value in flat(branch, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: tree} if path else {}


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which the configurations differ, with the value of each (None where it has none), in the order of the
    first that has them.
    """
    trees = [flat(config) for config in configs]
    names = dict.fromkeys(name for tree in trees for name in tree)
    found = {}
    for name in names:
        values = [tree.get(name) for tree in trees]
        if name not in OWN and len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1:
            found[name] = values
    return found


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that changed, each with its old and its new value; empty where none did."""
    return "; ".join(
        f"{name}: {json.dumps(was, default=str)} → {json.dumps(value, default=str)}"
        for name, (was, value) in differing([before, now]).items()
    )
