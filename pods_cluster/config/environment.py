"""The `environment` section: what answers the model in rollouts of several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from pods_cluster.config.base import LONGEST_WAIT, Section, usable_path


class EnvironmentConfig(Section):
    """The environment that answers the model: a rollout then has several turns. Left out: rollouts have one turn."""

    name: str = Field(min_length=1)
    """`path/to/file.py:Class` or `package.module:Class` of a `pods_cluster.environments.Environment`, made anew for each
    rollout; `pods_cluster.environments:ToolEnvironment` calls tools."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class."""
    code: str | None = Field(default=None, min_length=1)
    """A class itself, pickled: Python's `pods_cluster.train` writes it where no module holds the class, whose name is then
    only told to people."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of the model in one rollout; one that has not ended by then is cut and finishes with `length`."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that the model may sample in one turn; left out: what is left of `generator.max_tokens`, which bounds all
    turns and what the environment writes between them."""
    timeout: float = Field(default=30.0, gt=0, le=LONGEST_WAIT)
    """Seconds that one call of the environment may take; after that its process is killed, and the rollout counts as
    failed."""
    max_seconds: float = Field(default=600.0, gt=0, le=LONGEST_WAIT)
    """Seconds from a rollout's first turn after which it gets no further one; it is cut and finishes with `length`."""
    memory_limit: float | None = Field(default=2.0, gt=0)
    """GiB that the environment of one rollout may hold, with all that it starts (Linux); above it is killed, and the rollout
    counts as failed (`memory`). null: no limit."""

    _paths = field_validator("name")(usable_path)
