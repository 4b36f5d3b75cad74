"""The registry of down-sampling rules: built-in ones by name, and functions of a user's own modules.

A run names its rule in `selector.rule`: a registered name, or `package.module:function` for a function that is
imported when the rule is first needed, in the process that needs it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pods_cluster.config import ConfigError
from pods_cluster.selection import rules
from pods_cluster.selection.abs_advantage import abs_advantage
from pods_cluster.selection.balanced import balanced
from pods_cluster.selection.cost_aware import cost_aware
from pods_cluster.selection.gfpo import reward_per_token, shortest
from pods_cluster.selection.rules import Indices, Rewards, RuleContext, RuleFunction, Weighted, Weights
from pods_cluster.selection.settle import SettledCondition, is_settled
from pods_cluster.types import GroupId


class UnknownRuleError(ConfigError, ValueError):
    """`selector.rule` names no rule."""


class RuleOptionsError(ConfigError, ValueError):
    """`selector.options` do not fit the rule's keyword arguments."""


class RuleError(RuntimeError):
    """A rule raised, or did not return m distinct indices."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its name and options. `settled` is its settled condition, None where it states none."""

    name: str
    function: RuleFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    settled: SettledCondition | None = None
    builtin: bool = False
    """Built-in rules are proven in the tests; what other rules return is checked at every call."""
    reads_rewards_only: bool = False
    weighted: bool = False
    """Whether the rule returns `Weighted`; one of a user's own shows that by what it returns."""

    def choose(
        self, rewards: Rewards, m: int, rng: np.random.Generator, context: RuleContext
    ) -> tuple[Indices, Weights | None]:
        """Return the m indices that the rule chooses, in rising order, and their weights where it gives any.

        Raises RuleError with what it returned or raised.
        """
        if self.builtin:
            found = self.function(rewards, m, rng, context, **self.options)
            return (found.indices, found.weights) if isinstance(found, Weighted) else (found, None)
        given = rewards.copy()  # a rule that sorts in place must not touch the group
        try:
            chosen = self.function(given, m, rng, context, **self.options)
        except Exception as error:
            raise RuleError(
                f"selector.rule: {self.name!r} failed on group {context.group} ({len(rewards)} rewards, m = {m}): "
                f"{type(error).__name__}: {error}"
            ) from error
        weights = None
        if isinstance(chosen, Weighted):
            chosen, weights = chosen
        indices, order = _checked(self.name, chosen, len(rewards), m, context.group)
        return indices, None if weights is None else _checked_weights(self.name, weights, m, context.group)[order]


def _checked_weights(name: str, weights: Any, m: int, group: GroupId) -> Weights:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (m,) or not np.isfinite(values).all() or bool((values < 0).any()):
        raise RuleError(
            f"selector.rule: {name!r} returned the weights {weights!r} for group {group}; a rule that weights gives {m} "
            f"finite numbers from 0 on, one for each index"
        )
    return values


def _checked(name: str, chosen: Any, n: int, m: int, group: GroupId) -> tuple[Indices, Indices]:
    """The indices in rising order, and the order that puts them there."""

    def refuse(why: str) -> RuleError:
        shown = repr(chosen)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        return RuleError(
            f"selector.rule: {name!r} returned {shown} for group {group}, {why}; "
            f"a rule returns {m} distinct integers in 0..{n - 1}"
        )

    try:
        indices = np.asarray(list(chosen) if not isinstance(chosen, np.ndarray) else chosen)
    except (TypeError, ValueError):
        raise refuse("which is not a list of indices") from None
    if indices.ndim != 1 or len(indices) != m:
        raise refuse(f"of shape {indices.shape} where ({m},) is needed")
    if not np.issubdtype(indices.dtype, np.integer):
        raise refuse(f"of type {indices.dtype} where integers are needed")
    order = np.argsort(indices, kind="stable")
    indices = indices.astype(np.intp)[order]
    if indices[0] < 0 or indices[-1] >= n:
        raise refuse("with an index out of range")
    if np.any(indices[1:] == indices[:-1]):
        raise refuse("with an index twice")
    return indices, order


_RULES: dict[str, Rule] = {
    "max_variance": Rule("max_variance", rules.max_variance, settled=is_settled, builtin=True, reads_rewards_only=True),
    "max_reward": Rule("max_reward", rules.max_reward, builtin=True, reads_rewards_only=True),
    "min_reward": Rule("min_reward", rules.min_reward, builtin=True, reads_rewards_only=True),
    "random": Rule("random", rules.random, builtin=True, reads_rewards_only=True),
    "percentile": Rule("percentile", rules.percentile, builtin=True, reads_rewards_only=True),
    "abs_advantage": Rule("abs_advantage", abs_advantage, builtin=True, reads_rewards_only=True),
    "balanced": Rule("balanced", balanced, builtin=True, reads_rewards_only=True),
    "shortest": Rule("shortest", shortest, builtin=True),
    "reward_per_token": Rule("reward_per_token", reward_per_token, builtin=True),
    "cost_aware": Rule("cost_aware", cost_aware, builtin=True, weighted=True),
}


def known_rules() -> list[str]:
    """Return the names of the registered rules."""
    return sorted(_RULES)


def register_rule(
    name: str, *, settled: SettledCondition | None = None, replace: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Decorate a function to register it as a rule under `name` in this process.

    The selector runs in a process of its own, which sees a registration only when it imports the module: in a run's
    configuration write `selector.rule: package.module:function`. Raises ValueError for a name that is taken.
    """

    def add(function: RuleFunction) -> RuleFunction:
        if ":" in name or not name.strip():
            raise ValueError(f"rule name: {name!r} must be a word without ':'")
        if name in _RULES and not replace:
            raise ValueError(f"rule name: {name!r} is taken; choose another, or pass replace=True")
        _RULES[name] = Rule(name, function, settled=settled)
        return function

    return add


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """Find the rule that `selector.rule: name` names, with `selector.options`.

    `name` is a registered one or `package.module:function`, whose function may carry its settled condition as an
    attribute `settled`. Raises UnknownRuleError or RuleOptionsError, naming field, value and fix.
    """
    rule = _RULES.get(name) or _imported(name)
    options = dict(options or {})
    if not options and rule.builtin:
        return rule
    _check_call(rule, options)
    chosen = replace(rule, options=options)
    if chosen.builtin:  # its options are refused by what it says of their values, on a group made up for that
        context = RuleContext(GroupId(0, 0), 0, lengths=np.array([1, 2], dtype=np.int32))
        try:
            chosen.choose(np.array([0.0, 1.0]), 1, np.random.default_rng(0), context)
        except (ValueError, TypeError) as error:
            raise RuleOptionsError(f"selector.options: {error} (rule {rule.name!r})") from error
    return chosen


def _imported(name: str) -> Rule:
    module_name, colon, attribute = name.partition(":")
    known = ", ".join(known_rules())
    if not colon:
        close = difflib.get_close_matches(name, known_rules(), n=1, cutoff=0.5)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownRuleError(
            f"selector.rule: {name!r} is not a known rule; {guess}known rules: {known}; "
            f"a rule of your own is written as package.module:function"
        )
    if not module_name or not attribute:
        raise UnknownRuleError(
            f"selector.rule: {name!r} is incomplete; write package.module:function (known rules: {known})"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(missing + ".")):
            raise UnknownRuleError(
                f"selector.rule: {name!r} names the module {module_name!r}, which cannot be found; put it "
                f"on PYTHONPATH or install it (known rules: {known})"
            ) from error
        raise UnknownRuleError(f"selector.rule: {name!r}: importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise UnknownRuleError(
            f"selector.rule: {name!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(attribute, functions, n=1, cutoff=0.5)
        guess = f"did you mean '{module_name}:{close[0]}'? " if close else ""
        found = "is not a function" if function is not None else "does not exist"
        raise UnknownRuleError(
            f"selector.rule: {name!r}: {attribute!r} {found} in {module_name!r}; {guess}known rules: {known}"
        )
    return Rule(name, function, settled=getattr(function, "settled", None))


def _check_call(rule: Rule, options: dict[str, Any]) -> None:
    """Refuse a function that cannot be called as a rule or does not take these options, before any rollout is made."""
    try:
        signature = inspect.signature(rule.function)
    except (TypeError, ValueError):  # a builtin without a signature: its first call will tell
        return
    try:
        signature.bind(None, 1, None, None)
        takes_the_four = True
    except TypeError:
        takes_the_four = False
    try:
        signature.bind(None, 1, None, None, **options)
    except TypeError as error:
        if takes_the_four or (options and len(signature.parameters) >= 4):
            accepted = list(signature.parameters)[4:]
            raise RuleOptionsError(
                f"selector.options: {options} do not fit the rule {rule.name!r} ({error}); "
                f"it takes {', '.join(accepted) if accepted else 'no options: leave selector.options out'}"
            ) from error
        raise UnknownRuleError(
            f"selector.rule: {rule.name!r} has the signature {signature} ({error}); "
            f"a rule is a function (rewards, m, rng, context, **options) -> m indices"
        ) from error
