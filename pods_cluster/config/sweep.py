"""A sweep's YAML file: arms x seeds as overrides of one configuration, all validated together."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pods_cluster.config.base import ConfigError, Section
from pods_cluster.config.load import load_config, load_tree
from pods_cluster.config.tree import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
GRPO, GRPO_GA, GRPO_PODS = "grpo", "grpo-ga", "grpo-pods"


class ThreeArms(Section):
    """The paper's three arms (arXiv 2504.13818): `grpo` makes m and trains m, `grpo-ga` makes n and trains all of them in
    micro-batches, `grpo-pods` makes n and trains m. All have the prompts a step, the pools and the rule of the base.
    """

    n: int = Field(ge=3)
    """Rollouts a prompt of `grpo-ga` and `grpo-pods`."""
    m: int = Field(ge=2)
    """Rollouts a prompt that `grpo` and `grpo-pods` train on."""

    @model_validator(mode="after")
    def _fewer_are_kept(self) -> ThreeArms:
        if self.m >= self.n:
            raise ValueError(f"m: {self.m} must be below n: {self.n}; with m = n the three arms are one")
        return self

    def arms(self) -> dict[str, dict[str, Any]]:
        """The overrides of each arm. A group is trained from m valid rewards on in all of them."""

        def arm(n: int, m: int) -> dict[str, Any]:
            return {
                "generator.rollouts_per_prompt": n,
                "generator.rollouts_range": None,
                "selector.keep": m,
                "selector.min_valid": self.m,
                "selector.settle": "off",
            }

        return {GRPO: arm(self.m, self.m), GRPO_GA: arm(self.n, self.n), GRPO_PODS: arm(self.n, self.m)}


class SweepConfig(Section):
    """A sweep's YAML file."""

    base: str
    """The run's YAML file that all arms start from; a relative path counts from the sweep's file."""
    name: str
    """Name of the sweep: its runs lie in `<run.dir>/<name>/`, and are called `<name>-<arm>-s<seed>`."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of all arms, as in `run.steps: 100`; sections may be nested."""
    seeds: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1)
    """Seeds of each arm (`run.seed`), or how many, from 0 on. Arms with the same seeds are compared in pairs."""
    three_arms: ThreeArms | None = None
    """Adds the paper's arms `grpo`, `grpo-ga` and `grpo-pods`."""
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of each arm by its name; `{}` is the base itself. Those of an arm of `three_arms` come on top of its own."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Values of settings: an arm for each combination, crossed with the other arms where there are any."""
    baseline: str | None = None
    """The arm that others are compared with; left out: `grpo-ga` of `three_arms`, else the first."""
    metric: str = "eval/greedy_accuracy"
    """The metric in which arms are compared."""
    target: float | None = None
    """The value to reach, named before the runs; left out: `gain` or `share`."""
    gain: float | None = Field(default=None, gt=0)
    """The value to reach is the baseline's before its first step, and this on top of it: named before the runs where nobody
    knows yet what the model starts with."""
    share: float = Field(default=0.99, gt=0, le=1)
    """Share of the baseline's best that counts as reaching it."""
    parallel: int | Literal["auto"] = 1
    """Runs at once; `auto`: as many as the cluster's CPUs and GPUs hold."""
    isolate: bool = False
    """Each run has whole cards and an equal share of the cores of this machine to itself, and a Ray cluster of its own on
    them: runs side by side do not slow each other. Of `parallel` then no more than fit on the cards."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _a_number_of_seeds(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"{value} seeds make no run; give 1 or more, or a list as in [0, 1, 2]")
            return list(range(value))
        return value

    @field_validator("seeds")
    @classmethod
    def _each_seed_once(cls, value: list[int]) -> list[int]:
        if doubled := sorted({seed for seed in value if value.count(seed) > 1}):
            raise ValueError(f"{value} names the seed {doubled[0]} twice; leave one out")
        return value

    @field_validator("parallel")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} runs at once make nothing; give 1 or more, or auto")
        return value

    @model_validator(mode="after")
    def _names_fit(self) -> SweepConfig:
        for name in (self.name, *self.arms):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        if empty := [name for name, values in self.grid.items() if not values]:
            raise ValueError(f"grid: {empty[0]!r} has no values; list one or more")
        found = self.all_arms()
        if not found:
            raise ValueError("a sweep needs arms: give three_arms, arms or grid")
        if self.target is not None and self.gain is not None:
            raise ValueError(
                f"target: {self.target:g} and gain: {self.gain:g} both say what is to be reached; leave one out"
            )
        if self.baseline is not None and self.baseline not in found:
            raise ValueError(f"baseline: {self.baseline!r} is none of the arms {', '.join(found)}")
        return self

    def all_arms(self) -> dict[str, dict[str, Any]]:
        """Every arm's own settings by its name, in the order of the file."""
        own = self.three_arms.arms() if self.three_arms else {}
        for arm, settings in self.arms.items():
            own[arm] = own.get(arm, {}) | settings
        if not self.grid:
            return own
        crossed: dict[str, dict[str, Any]] = {}
        for arm, settings in (own or {"": {}}).items():
            for values in itertools.product(*self.grid.values()):
                chosen = dict(zip(self.grid, values, strict=True))
                words = [f"{name.rpartition('.')[2]}{_word(value)}" for name, value in chosen.items()]
                crossed["-".join([arm, *words] if arm else words)] = settings | chosen
        return crossed

    @property
    def baseline_arm(self) -> str:
        arms = list(self.all_arms())
        if self.baseline is not None:
            return self.baseline
        return GRPO_GA if GRPO_GA in arms else arms[0]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep."""

    arm: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir) / self.name


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep with all its runs, seed by seed: a sweep that is cut short has whole seeds to compare."""

    config: SweepConfig
    runs: list[SweepRun]

    @property
    def arms(self) -> dict[str, list[SweepRun]]:
        found: dict[str, list[SweepRun]] = {}
        for run in self.runs:
            found.setdefault(run.arm, []).append(run)
        return found


def load_sweep(
    path: str | Path, overrides: Iterable[str] = (), *, arms: Sequence[str] = (), seeds: int | None = None
) -> Sweep:
    """Read a sweep's file and the configurations of all its runs; `overrides` are settings of every arm.

    `arms` and `seeds` leave all but these arms, and all but the first seeds, for another time. Raises ConfigError with the
    problems of all runs at once, each told once with the arms that have it.
    """
    path, overrides = Path(path), list(overrides)
    try:
        config = SweepConfig.model_validate(load_tree(path, "a sweep"))
    except ValidationError as error:
        raise ConfigError.listing(str(path), [_sentence(item) for item in error.errors()]) from None
    base = path.parent / Path(config.base).expanduser()
    problems: dict[str, list[str]] = {}
    runs: list[SweepRun] = []
    chosen = config.all_arms()
    if unknown := [arm for arm in arms if arm not in chosen]:
        raise ConfigError(f"{path}: arms: {unknown[0]!r} is none of the arms {', '.join(chosen)}")
    chosen = {arm: settings for arm, settings in chosen.items() if not arms or arm in arms}
    for seed in config.seeds[:seeds]:
        for arm, settings in chosen.items():
            name = f"{config.name}-{arm}-s{seed}"
            wanted = [*as_overrides(config.overrides), *overrides, *as_overrides(settings)]
            try:
                loaded = load_config(base, [*wanted, f"run.seed={seed}", f"run.name={json.dumps(name)}"])
            except ConfigError as error:
                # a list of problems has its source in the first line; a file that cannot be read has one line
                lines = str(error).splitlines()
                for line in lines[1:] or lines:
                    problems.setdefault(line.removeprefix("  - "), []).append(arm)
                continue
            run = loaded.run.model_copy(update={"dir": str(Path(loaded.run.dir) / config.name)})
            cluster = loaded.cluster
            if cluster.address == "local":  # one cluster for all runs: the sweep starts it, and tells them its address
                cluster = cluster.model_copy(update={"address": "auto"})
            placed = loaded.model_copy(update={"run": run, "cluster": cluster})
            runs.append(SweepRun(arm, seed, placed))
    if problems:
        texts = [
            f"{text} ({'all arms' if set(having) == set(chosen) else 'arm ' + ', '.join(dict.fromkeys(having))})"
            for text, having in problems.items()
        ]
        raise ConfigError.listing(str(path), texts)
    return Sweep(config, runs)


def as_overrides(settings: Mapping[str, Any], above: str = "") -> list[str]:
    """Settings, dotted or nested, as `key=value` overrides in the order given."""
    found = []
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found += as_overrides(value, f"{name}.")
        else:
            found.append(f"{name}={json.dumps(value)}")
    return found


def _word(value: Any) -> str:
    """A value as a part of an arm's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", value if isinstance(value, str) else json.dumps(value)).strip("-.")


def _sentence(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown field (value {item['input']!r}); known here: {', '.join(SweepConfig.model_fields)}"
    if item["type"] == "missing":
        return f"{where}: missing; it has no default, add it"
    message = item["msg"].removeprefix("Value error, ")
    return (
        f"{where}: {message}"
        if item["type"] == "value_error" and where
        else message
        if not where
        else (f"{where}: {item['input']!r} is refused: {message[0].lower()}{message[1:]}")
    )
