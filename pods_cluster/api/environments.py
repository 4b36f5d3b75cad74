"""Environments as Python has them (classes, functions as tools) → the section `environment` of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pods_cluster.api.rewards import lies_installed, named
from pods_cluster.config import ConfigError, EnvironmentConfig
from pods_cluster.environments import ToolEnvironment
from pods_cluster.scoring.pickled_function import PickleError, pickle_function


def environment_section(environment: Any) -> Any:
    """Return the section of a class, of a name, or of a section whose `name` may be a class.

    A class of an installed package is named, any other one travels by value. Raises ConfigError for one that cannot.
    """
    if isinstance(environment, EnvironmentConfig):
        return environment.model_dump(mode="json")
    section = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
    if not callable(section.get("name")):
        return section
    given = named(section["name"], "environment", "class")
    given.pop("label", None)
    return section | given


def tool_section(tools: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    """Return the section of an environment that calls these functions. Raises ConfigError for one that cannot be pickled."""
    environment = functools.partial(ToolEnvironment, tools=list(tools))
    own = next((tool.__module__ for tool in tools if not lies_installed(tool.__module__)), "__main__")
    try:
        code = pickle_function(environment, own)
    except PickleError as error:
        raise ConfigError(
            f"tools: cannot be sent to the processes that run them ({error}); load or make what they hold inside, or name "
            f"them in environment.options (docs/environments.md)"
        ) from error
    return {"name": "pods_cluster.environments:ToolEnvironment", "code": code}
