"""The selection policy of a run: the `selector` section, resolved together with what other sections say."""

from __future__ import annotations

from dataclasses import dataclass

from pods_cluster.config import Config, ConfigError, SelectorConfig
from pods_cluster.scoring.reward_registry import declared_range
from pods_cluster.scoring.total_reward import total_range
from pods_cluster.selection.rule_registry import Rule, resolve
from pods_cluster.selection.select import SignalScope
from pods_cluster.selection.stopping import Settling


@dataclass(frozen=True, slots=True)
class SelectionPolicy:
    """Everything that decides the selections of one run.

    `config` is the run's `selector` section and `rule` the function that it names; `seed` is `run.seed`, `scope` is
    `learner.advantage.scope`; `settling` says how groups are stopped early, None where they are not. With
    `mask_truncated` rollouts that were cut count nothing in the loss.
    """

    config: SelectorConfig
    rule: Rule
    seed: int
    scope: SignalScope = "kept"
    settling: Settling | None = None
    mask_truncated: bool = False

    @property
    def min_valid(self) -> int:
        """Fewest valid rewards that a group is trained with: `selector.min_valid`, else `selector.keep`."""
        return self.config.keep if self.config.min_valid is None else self.config.min_valid


def selection_policy(config: Config) -> SelectionPolicy:
    """Resolve how a run selects. Imports the rule's module.

    Raises ConfigError: an unknown rule (`UnknownRuleError`), options that it does not take (`RuleOptionsError`), or
    `selector.settle` with a rule that states no settled condition or with rewards that declare no range, or a rule that
    weights what it keeps with advantages or a loss that its weights do not fit.
    """
    rule = resolve(config.selector.rule, config.selector.options)
    if rule.weighted:
        _refuse_unfit_for_weights(config)
    scope = config.learner.advantage.scope
    return SelectionPolicy(config.selector, rule, config.run.seed, scope, _settling(config, rule),
                           config.learner.mask_truncated)  # fmt: skip


def _refuse_unfit_for_weights(config: Config) -> None:
    """Inverse-probability weights estimate a mean over the group: of its own advantages, not of those after the choice."""
    learner, name = config.learner, config.selector.rule
    problems = []
    if learner.advantage.scope != "group":
        problems.append(
            f"learner.advantage.scope: {learner.advantage.scope} is not possible with selector.rule: {name}, whose weights "
            f"estimate the mean over the whole group; set scope: group"
        )
    if learner.loss == "token_mean":
        problems.append(
            f"learner.loss: token_mean divides by the kept tokens, which selector.rule: {name} draws by their cost; use "
            f"sequence_mean or dr_grpo"
        )
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError.listing(config.run.name, problems)


def _settling(config: Config, rule: Rule) -> Settling | None:
    selector = config.selector
    if selector.settle == "off":
        return None
    if rule.settled is None:
        raise ConfigError(
            f"selector.settle: {selector.settle} needs a rule with a settled condition, which {selector.rule!r} does not "
            f"state; give the function an attribute `settled` (rewards, m, low, high, tolerance) -> bool, "
            f"or set selector.settle: off"
        )
    bounds = total_range(config.reward)
    if bounds is None:
        at = next(i for i, reward in enumerate(config.reward) if reward.weight and declared_range(reward) is None)
        raise ConfigError(
            f"selector.settle: {selector.settle} needs to know how high and low rewards can get, but "
            f"reward.{at}.name: {config.reward[at].name!r} declares no range; add reward.{at}.range: [lowest, highest], "
            f"or set selector.settle: off"
        )
    try:
        return Settling(selector, *bounds, rule.settled)
    except ValueError as error:
        raise ConfigError(f"{error}, or set selector.settle: off") from None
