"""Rewards as Python has them (functions, names, sections) → entries of a configuration's `reward` list."""

from __future__ import annotations

import functools
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pods_cluster.config as settings
from pods_cluster.scoring.pickled_function import PickleError, pickle_function

RewardLike = str | Callable[..., Any] | Mapping[str, Any] | settings.RewardConfig
"""A reward: a name as in YAML, a function, or a section of `reward` whose `name` may be a function."""


def reward_entries(
    rewards: RewardLike | Sequence[RewardLike], defaults: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return one section for each reward; `defaults` are fields of functions, where these do not say otherwise.

    A function of an installed package is named, and imported where it runs. Any other one travels by value. Raises
    ConfigError for what is no reward, and for a function that cannot be pickled.
    """
    several = [rewards] if callable(rewards) or isinstance(rewards, str | Mapping | settings.RewardConfig) else rewards
    if not isinstance(several, Sequence):
        raise settings.ConfigError(
            f"reward: {rewards!r} is no reward; give a function, a name such as 'math_answer', or a list of these"
        )
    entries = [_entry(reward, index, defaults or {}) for index, reward in enumerate(several)]
    _tell_apart(entries)
    return entries


def _entry(reward: Any, index: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(reward, settings.RewardConfig):
        return reward.model_dump(mode="json")
    section = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
    function = section.get("name")
    if isinstance(function, str) or not callable(function):
        if isinstance(reward, Mapping) or isinstance(function, str):
            return section
        raise settings.ConfigError(
            f"reward.{index}: {reward!r} is no reward; give a function, a name such as 'math_answer', or a section "
            f"such as {{'name': function, 'weight': 0.5}}"
        )
    return {
        **defaults,
        **named(function, f"reward.{index}"),
        **{key: value for key, value in section.items() if key != "name"},
    }


def named(function: Callable[..., Any], where: str, what: str = "function") -> dict[str, Any]:
    """The fields `name`, `label` and `code` of a function or a class; `where` is its place in the configuration.

    Raises ConfigError for one that cannot be pickled.
    """
    module, name = _module_of(function), _name_of(function)
    found = _resolve(module, name)
    if found is function and lies_installed(module):
        return {"name": f"{module}:{name}"}
    short = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "reward"
    try:
        code = pickle_function(function, "__main__" if lies_installed(module) else module)
    except PickleError as error:
        if found is function and module != "__main__":
            return {"name": f"{module}:{name}"}
        raise settings.ConfigError(
            f"{where}: the {what} {name} cannot be sent to the processes that run it ({error}); load or make what "
            f"it holds inside the {what}, or put it into a module of its own and name it, as in 'my_module:{short}'"
        ) from error
    return {"name": f"{module}:{name}", "label": short, "code": code}


def _module_of(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__module__", None) or type(inner).__module__


def _name_of(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(inner).__name__


def _resolve(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def lies_installed(module: str) -> bool:
    """Whether a module lies where packages are installed, and so most likely on every node of a cluster."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(settings.__file__).parents[1])]
    return any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)


def _tell_apart(entries: list[dict[str, Any]]) -> None:
    """Number the labels of functions that have the same name: metrics go by it."""
    taken: set[str] = set()
    for entry in entries:
        if "code" not in entry:
            taken.add(str(entry.get("label") or entry.get("name", "")).rpartition(":")[2])
    for entry in entries:
        if "code" in entry:
            label, number = entry["label"], 2
            while entry["label"] in taken:
                entry["label"], number = f"{label}_{number}", number + 1
            taken.add(entry["label"])
