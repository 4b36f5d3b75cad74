"""How one reward is declared in the config, and the error that says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Style = Literal["auto", "trl", "verl"]
_CHOICES = {
    "style": ("auto", "trl", "verl"),
    "none": ("missing", "skip"),
    "completions": ("auto", "text", "messages"),
}


class RewardConfigError(ValueError):
    """A reward that cannot be used as declared: names the field, its value and the fix."""

    def __init__(self, where: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{where} = {value!r}: {problem}. {fix}")
        self.where, self.value, self.problem, self.fix = where, value, problem, fix

    def __reduce__(self) -> tuple[Any, ...]:
        return RewardConfigError, (self.where, self.value, self.problem, self.fix)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One entry of `reward:`.

    name: a built-in, `module:function`, or `path/to/file.py:function`.
    weight: its factor in the total. A reward of weight 0 is measured, never needed.
    label: its name in metrics; the function's name when left out.
    style: how a user function is called: `trl`, `verl`, or told from its parameters (`auto`).
    timeout_s: seconds that one call may take; the pool's when left out.
    range: (lowest, highest) value, for early settling; built-ins know theirs. A value outside it is a failure.
    none: what None means: the reward is `missing`, or does not apply to the row (`skip`, as in TRL).
    batch: most completions in one call. 1 scores each alone; more helps functions that work on many at once.
    completions: what a TRL function gets: `text`, chat `messages`, or messages when the prompt is a chat (`auto`).
    options: keyword arguments for the function.
    """

    name: str
    weight: float = 1.0
    label: str | None = None
    style: Style = "auto"
    timeout_s: float | None = None
    range: tuple[float, float] | None = None
    none: Literal["missing", "skip"] = "missing"
    batch: int = 1
    completions: Literal["auto", "text", "messages"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its part in a `Score` and in metrics."""
        return self.label or self.name.rpartition(":")[2]


def check_specs(specs: Sequence[RewardSpec]) -> None:
    """Refuses what no scorer could use, before any process starts. Raises RewardConfigError."""
    if not specs:
        raise RewardConfigError("reward", [], "no reward is given", "Name at least one, such as math_answer")
    seen: dict[str, int] = {}
    for index, spec in enumerate(specs):
        _check_values(spec, f"reward[{index}]")
        if (first := seen.setdefault(spec.key, index)) != index:
            raise RewardConfigError(
                f"reward[{index}].name",
                spec.name,
                f"its label {spec.key!r} is that of reward[{first}]",
                f"Give one of them another label: reward[{index}].label",
            )
    if all(spec.weight == 0 for spec in specs):
        raise RewardConfigError("reward[0].weight", specs[0].weight, "every weight is 0", "Give one reward a weight")


def _check_values(spec: RewardSpec, where: str) -> None:
    if not spec.name or not isinstance(spec.name, str):
        raise RewardConfigError(f"{where}.name", spec.name, "no name", "Name a built-in reward or module:function")
    if not _is_number(spec.weight):
        raise RewardConfigError(f"{where}.weight", spec.weight, "not a finite number", "Give a number such as 1.0")
    if spec.timeout_s is not None and not (_is_number(spec.timeout_s) and spec.timeout_s > 0):
        raise RewardConfigError(f"{where}.timeout_s", spec.timeout_s, "not a time", "Give seconds above 0")
    if not isinstance(spec.batch, int) or spec.batch < 1:
        raise RewardConfigError(f"{where}.batch", spec.batch, "not a count", "Give a whole number from 1")
    for name, allowed in _CHOICES.items():
        if getattr(spec, name) not in allowed:
            raise RewardConfigError(
                f"{where}.{name}", getattr(spec, name), "unknown", f"Choose one of: {', '.join(allowed)}"
            )
    if spec.range is not None:
        ends = tuple(spec.range)
        if len(ends) != 2 or not all(map(_is_number, ends)) or not ends[0] < ends[1]:
            raise RewardConfigError(f"{where}.range", spec.range, "not a range", "Give [lowest, highest], finite")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
