"""The `reward` and `scoring` sections: what a rollout is worth, and the processes that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pods_cluster.config.base import LONGEST_WAIT, ConfigError, Section, usable_path


class RewardConfigError(ConfigError, ValueError):
    """A reward that cannot be used as it is configured. The text names the field, its value and the fix.

    `where` is the field's path as the YAML file spells it: `reward.0.timeout`, or `reward` for the whole list.
    """

    def __init__(self, index: int | None, field: str, value: object, problem: str, fix: str) -> None:
        """`index` in the list `reward` and `field` of that entry; None and an empty field for the list itself."""
        self.where = "reward" if index is None else f"reward.{index}.{field}"
        super().__init__(f"{self.where}: {value!r} {problem}; {fix}")
        self._arguments = index, field, value, problem, fix

    def __reduce__(self) -> tuple[Any, ...]:
        return RewardConfigError, self._arguments


class RewardConfig(Section):
    """One reward; the rollout's reward is the weighted sum of all."""

    name: str = Field(min_length=1)
    """A built-in reward (`pods rewards` lists them), `package.module:function` or `path/to/file.py:function`."""
    label: str | None = Field(default=None, min_length=1)
    """Name in metrics and samples; left out: the reward's name, for a user's function that of the function."""
    weight: float = 1.0
    """Factor of this reward in the sum; 0: it is measured and not trained on."""
    style: Literal["auto", "trl", "verl"] = "auto"
    """Calling convention of a user function: TRL's `f(prompts, completions, **columns)` or verl's
    `compute_score(...)`; `auto`: by the names of its parameters."""
    timeout: float = Field(default=10.0, gt=0, le=LONGEST_WAIT)
    """Seconds that one call may take; after that the scorer process is killed, and the reward counts as missing."""
    range: tuple[float, float] | None = None
    """Lowest and highest value of a user function; built-in rewards declare theirs. A value outside counts as a
    failure."""
    none: Literal["missing", "skip"] = "missing"
    """Meaning of None from the function: the reward is missing and the rollout is excluded (`missing`), or it does not
    apply and is left out of the sum (`skip`)."""
    batch: int = Field(default=1, ge=1)
    """Most completions in one call of a user's function; with 1 each is scored as soon as it ends."""
    completions: Literal["auto", "text", "messages"] = "auto"
    """Form in which a TRL function gets completions: texts, chat messages, or (`auto`) messages where the prompt is a chat."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the reward."""
    code: str | None = Field(default=None, min_length=1)
    """A function itself, pickled: Python's `pods_cluster.train` writes it where no module holds the function, whose name
    is then only told to people."""

    _paths = field_validator("name")(usable_path)

    @property
    def key(self) -> str:
        """The reward's name in scores and metrics: its label, else the name of its function."""
        return self.label or self.name.rpartition(":")[2]

    @model_validator(mode="after")
    def _range_is_ordered(self) -> RewardConfig:
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range: {list(self.range)} is not [lowest, highest]; swap or widen it")
        return self


def check_sum(rewards: Sequence[RewardConfig]) -> None:
    """Refuse rewards that have no weighted sum: none at all, two of one name, or no weight above or below 0.

    Raises RewardConfigError.
    """
    if not rewards:
        raise RewardConfigError(None, "", [], "names no reward", "add one, such as name: math_answer")
    first_of: dict[str, int] = {}
    for index, reward in enumerate(rewards):
        first = first_of.setdefault(reward.key, index)
        if first != index:
            raise RewardConfigError(
                index,
                "name",
                reward.name,
                f"is called {reward.key!r} in the metrics, as reward.{first} is",
                f"give one of them another reward.{index}.label",
            )
    if all(reward.weight == 0 for reward in rewards):
        raise RewardConfigError(0, "weight", rewards[0].weight, "leaves no reward with a weight", "give one a weight")


class ScoringConfig(Section):
    """The scorer processes of each generator worker."""

    workers: int = Field(default=1, ge=1)
    """Scorer processes for each generator worker."""
    load_timeout: float = Field(default=300.0, gt=0, le=LONGEST_WAIT, allow_inf_nan=False)
    """Seconds that a scorer process may take to import and prepare all rewards, apart from any call; at most
    `generator.start_timeout` counts while a generator starts."""
    memory_limit: float | None = Field(default=4.0, gt=0)
    """GiB that one scorer process may hold, with all that it starts (Linux); above it they are killed, and the reward
    that ran counts as failed (`memory`). null: no limit."""
    preload: bool = True
    """Import the rewards once before any worker starts, on the node of the run's controller, so that what cannot be
    imported ends the start within seconds; false: where only the workers' nodes can import them."""
    patience: float = Field(default=300.0, gt=0, le=LONGEST_WAIT)
    """Seconds in which rewards fail and not one rollout gets a valid reward, after which the run ends with their cause."""
