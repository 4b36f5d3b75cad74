"""Selection policies, selectors and configurations for the tests of the selector."""

from __future__ import annotations

from typing import Any

from pods_cluster.config import Config, SelectorConfig, build_config
from pods_cluster.selection.policy import SelectionPolicy
from pods_cluster.selection.rule_registry import resolve
from pods_cluster.selection.selector_core import SelectorCore
from pods_cluster.selection.stopping import Settling
from pods_cluster.types import Fate, GroupId


def policy(keep: int = 2, **selector: Any) -> SelectionPolicy:
    """The policy of a `selector` section under seed 0; rewards lie in [0, 1] where it settles."""
    config = SelectorConfig(keep=keep, **selector)
    settling = None if config.settle == "off" else Settling(config, 0.0, 1.0)
    return SelectionPolicy(config, resolve(config.rule, config.options), seed=0, settling=settling)


def run_config(keep: int = 2, n: int = 4, staleness: int = 0, **selector: Any) -> Config:
    """A whole configuration that keeps `keep` of `n` rollouts; its reward lies in [0, 1]."""
    return build_config(
        {
            "model": {"path": "some/model"},
            "data": {"path": "rows.jsonl"},
            "reward": [{"name": "exact_match"}],
            "generator": {"rollouts_per_prompt": n},
            "selector": {"keep": keep, **selector},
            "staleness": staleness,
            "run": {"name": "selection"},
        }
    )


def core(keep: int = 2, **selector: Any) -> SelectorCore:
    return SelectorCore(policy(keep, **selector))


def expecting(*groups: GroupId, size: int = 4, **settings: Any) -> SelectorCore:
    selector = core(**settings)
    for group in groups:
        selector.expect(group, size)
    return selector


def only_fate(selector: SelectorCore, version: int = 0, staleness: int = 0) -> Fate:
    decision = selector.collect(8, version, staleness)
    assert decision.selections == []
    assert len(decision.fates) == 1
    return decision.fates[0].fate
