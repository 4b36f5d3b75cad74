"""Wrong configurations, made from right ones: every field with values that it cannot have, and settings that disagree."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pods_cluster.config.tree import Config

NOT_NUMBERS: tuple[Any, ...] = ("many", "10 minutes", "8GB", "5%", "1:30", "1e", [1, 2], {"a": 1}, True, False, float("nan"),
                                float("inf"), "", "\u0661\u0662 steps", 10**400)  # fmt: skip
NOT_TEXTS: tuple[Any, ...] = (5, 0.5, True, ["a"], {"a": 1}, "", "a\0b", "\ud800")
NOT_FLAGS: tuple[Any, ...] = ("maybe", 7, [True], {"a": 1}, "", 0.5)
NOT_CHOICES: tuple[Any, ...] = ("nonsense", ["a"], {"a": 1}, "")
NOT_PAIRS: tuple[Any, ...] = ("0.9", [1], [1, 2, 3], ["a", "b"], {"a": 1}, 5, [None, 1])
NOT_MAPPINGS: tuple[Any, ...] = ("text", ["a"], 5, True)
NOT_SECTIONS: tuple[Any, ...] = ("text", ["a"], 5, True)
NOT_LISTS: tuple[Any, ...] = ("text", {"a": 1}, 5, True, [], ["a"], [None], [5], [["a"]])
FREE_TEXTS = {"data.system"}
"""Texts that may be empty."""


LISTS: dict[str, tuple[Any, ...]] = {
    "generator.stop_tokens": ([], ["a"], [5]),
    "generator.stop_strings": ([], ["a"]),
    "data.mix": ([],),
}
"""What a list may hold, of what other lists refuse."""


@dataclass(frozen=True)
class Leaf:
    """A field of the configuration by its path; those of a list's items under index 0."""

    path: str
    info: FieldInfo

    @property
    def members(self) -> list[Any]:
        """The types of the field, those of a union one by one."""
        found = self.info.annotation
        return list(typing.get_args(found)) if typing.get_origin(found) in (typing.Union, types.UnionType) else [found]

    @property
    def nullable(self) -> bool:
        return type(None) in self.members

    def wrong_values(self) -> Iterator[Any]:
        """Values that the field cannot have: of other types, beyond its bounds, empty, null."""
        kinds = [kind for kind in self.members if kind is not type(None)]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections:
            yield from NOT_SECTIONS
        elif kinds == [bool]:
            yield from NOT_FLAGS
        elif len(kinds) > 1 or typing.get_origin(kinds[0]) is typing.Literal:
            yield from (value for value in NOT_CHOICES if not (tuple[str, ...] in kinds and value == ["a"]))
        elif kinds[0] in (int, float):
            yield from NOT_NUMBERS
            yield from (1.5,) if kinds[0] is int else ()
            yield from self._beyond_its_bounds(int(kinds[0] is int))
        elif kinds[0] is str:
            yield from (value for value in NOT_TEXTS if value != "" or self.path not in FREE_TEXTS)
        elif typing.get_origin(kinds[0]) is tuple:
            yield from NOT_PAIRS
        elif typing.get_origin(kinds[0]) is dict:
            yield from NOT_MAPPINGS
        elif typing.get_origin(kinds[0]) is list:
            yield from (value for value in NOT_LISTS if value not in LISTS.get(self.path, ()))
        else:
            raise NotImplementedError(f"{self.path}: no wrong values are known for {kinds}")
        if not self.nullable:
            yield None

    def _beyond_its_bounds(self, whole: int) -> Iterator[Any]:
        for rule in self.info.metadata:
            if isinstance(rule, Ge):
                yield typing.cast(Any, rule.ge) - 1
            elif isinstance(rule, Gt):
                yield rule.gt
                yield typing.cast(Any, rule.gt) - 1
            elif isinstance(rule, Le):
                yield typing.cast(Any, rule.le) + 1
            elif isinstance(rule, Lt):
                yield rule.lt
        if whole:
            yield -(10**30)


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Leaf]:
    """All fields, sections among them."""
    for name, info in section.model_fields.items():
        yield Leaf(prefix + name, info)
        inner, dots = section_of(info.annotation), "0." if typing.get_origin(info.annotation) is list else ""
        if inner is not None:
            yield from leaves(inner, f"{prefix}{name}.{dots}")


def section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := section_of(part)) is not None), None)


def with_value(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the tree with one value set; sections on the way are made."""
    changed = copy.deepcopy(tree)
    *parents, last = path.split(".")
    node: Any = changed
    for part, inner in pairwise([*parents, last]):
        if part.isdigit():
            node = node[int(part)]
        else:
            new = [ITEMS[part]] if inner.isdigit() else SECTIONS.get(part, {})
            node[part] = node.get(part) or copy.deepcopy(new)
            node = node[part]
    node[last] = value
    return changed


SECTIONS: dict[str, dict[str, Any]] = {"environment": {"name": "game.py:Game"}}
"""What sections without a default need."""
ITEMS: dict[str, dict[str, Any]] = {"mix": {"path": "more.jsonl"}, "reward": {"name": "math_answer"}}
"""An item of a list of sections that a tree does not have."""


def without_value(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the tree without one value."""
    changed = copy.deepcopy(tree)
    *parents, last = path.split(".")
    node: Any = changed
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node.pop(last, None)
    return changed


def misspelt(name: str) -> str:
    """The name with two letters swapped, or one too many where that changes nothing."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :] if len(name) > 3 else name
    return swapped if swapped != name else name + name[-1]


CONTRADICTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("selector.keep", {"generator.rollouts_per_prompt": 4, "selector.keep": 5}),
    ("selector.min_valid", {"selector.keep": 3, "selector.min_valid": 4}),
    ("learner.tokens_per_microbatch", {"generator.max_tokens": 50_000, "learner.tokens_per_microbatch": 50_000}),
    ("learner.prompts_per_step x selector.keep", {"learner.workers": 100_000}),
    ("learner.updates_per_batch", {"learner.prompts_per_step": 2, "learner.updates_per_batch": 3}),
    ("learner.warmup_steps", {"run.steps": 10, "learner.warmup_steps": 11}),
    ("run.eval.every", {"data.eval": None, "run.eval.every": 5}),
    ("data.revisit_target", {"data.revisit": None, "data.revisit_target": 0.25}),
    ("run.eval.minutes", {"data.eval": None, "run.eval.minutes": 0.5}),
    ("learner.kl.reference", {"learner.kl": {"coefficient": 0, "reference": "other"}}),
    ("learner.packing", {"learner.packing": "on", "model.attention": "eager"}),
    ("learner.lora.dropout", {"learner.lora": {"dropout": 0.1}, "learner.updates_per_batch": 2, "learner.prompts_per_step": 8}),
    ("learner.lora.send", {"learner.lora": {"send": "adapter"}, "generator.engine": "paced"}),
    ("generator.tensor_parallel", {"generator.engine": "transformers", "generator.tensor_parallel": 2}),
    ("generator.rollouts_range", {"staleness": 0, "generator.rollouts_per_prompt": "auto", "selector.keep": 4,
                                  "generator.rollouts_range": [32, 64]}),
    ("generator.rollouts_range", {"staleness": 1, "selector.keep": 16, "generator.rollouts_range": [8, 4096]}),
    ("generator.rollouts_per_prompt", {"staleness": 1, "generator.rollouts_per_prompt": 8, "selector.keep": 4,
                                       "generator.rollouts_range": [16, 32]}),
    ("generator.rollouts_per_prompt", {"generator.rollouts_per_prompt": "auto"}),
    ("selector.settle", {"selector.settle": "abort", "selector.rule": "random"}),
    ("selector.settle", {"selector.settle": "waves", "learner.advantage": {"scope": "group"}}),
    ("selector.waves", {"selector.settle": "waves", "generator.rollouts_per_prompt": 4, "selector.keep": 2,
                        "selector.waves": 5}),
    ("learner.gpus_per_worker", {"learner.gpus_per_worker": 0.5, "learner.workers": 2}),
    ("learner.gpus_per_worker", {"learner.gpus_per_worker": 1.5}),
    ("generator.gpus_per_worker", {"generator.gpus_per_worker": 2.5}),
    ("generator.gpus_per_worker", {"generator.engine": "vllm", "generator.gpus_per_worker": 1,
                                   "generator.tensor_parallel": 2}),
    ("weights.relay", {"weights": {"transport": "nccl", "relay": "node"}}),
    ("weights.relay", {"generator.gpus_per_worker": 0.5, "weights": {"transport": "nccl", "relay": "off"}}),
    ("learner.kernels", {"learner.kernels": "compile", "learner.zero_stage": 3}),
    ("learner.correction.mask", {"learner.correction": {"mask": [1.5, 2.0]}}),
    ("learner.betas", {"learner.betas": [0.9, 1.0]}),
    ("generator.top_p", {"generator.top_p": 0.9, "learner.correction": {"mode": "off"}}),
    ("generator.top_k", {"generator.top_k": 0}),
    ("generator.engine_options.device", {"generator.engine": "transformers", "generator.engine_options": {"device": 5}}),
    ("generator.engine_options.kv_cache", {"generator.engine": "transformers", "generator.engine_options": {"kv_cache": 5}}),
    ("generator.engine_options.logprobs", {"generator.engine": "vllm", "generator.engine_options": {"logprobs": 5}}),
    ("reward.1.name", {"reward": [{"name": "exact_match"}, {"name": "exact_match"}]}),
    ("reward.0.weight", {"reward": [{"name": "exact_match", "weight": 0}]}),
    ("reward.0.range", {"reward": [{"name": "a.py:f", "range": [1, 0]}]}),
)  # fmt: skip
"""The field that a message has to name, and the values that do not go together."""
