"""The built-in rewards. Each reads one completion and the row's answer, and declares its range."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pods_cluster.scoring import answer_equality
from pods_cluster.scoring.final_answer import (
    Where,
    delimited_answer,
    gold_answer,
    last_boxed,
    last_formula,
    last_number,
    last_statement,
    parse_number,
)
from pods_cluster.scoring.stated_values import states_several


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A reward, its range, and what to load before it runs.

    `function` takes what it reads of a request by name (`completion`, `answer`, `completion_ids`); its options are
    keyword-only.
    """

    function: Callable[..., float]
    range: tuple[float, float]
    warm_up: Callable[[], None] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What of a request it reads."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY)


def math_answer(completion: str, answer: str | None, *, where: Where = "any") -> float:
    r"""1 if the final answer of the completion equals the row's answer, else 0 (GSM8K, MATH).

    The final answer is the last of `\boxed{}`, `<answer>` and `####`; without any, the last number for a numeric
    answer, or the last formula or "answer is …" for another. `where` (`boxed`, `answer_tag`, `hash`) accepts that
    marker alone.
    """
    gold = gold_answer(_required(answer, "math_answer"))
    delimited = delimited_answer(completion, where)
    if delimited is not None:
        return float(answer_equality.answers_equal(gold, delimited))
    if where != "any":
        return 0.0
    formula = last_formula(completion)
    gold_number = parse_number(gold)
    if gold_number is None:
        candidates = (formula[0] if formula else None, last_statement(completion))
        return float(any(answer_equality.answers_equal(gold, candidate) for candidate in candidates if candidate))
    if formula is not None and last_number(formula[1]) is None:  # the end is a formula: 3 is not $2\sqrt{3}$
        return float(answer_equality.answers_equal(gold, formula[0]))
    lines = completion.strip().splitlines() or [""]
    if states_several(last_statement(completion) or lines[-1]):
        return 0.0
    return float(last_number(completion) == gold_number)


def exact_match(completion: str, answer: str | None) -> float:
    """1 if the completion is the answer, white space around both aside, else 0."""
    return float(completion.strip() == _required(answer, "exact_match").strip())


def think_answer_format(completion: str) -> float:
    """How well a completion is a think block followed by an answer block: max(0, 1 - 0.01 x characters outside both).

    At most one space or newline may stand between the blocks; without them the value is 0. The format reward of the
    PODS experiments (arXiv 2504.13818, section 4). Linear in the completion's length.
    """
    start = completion.find("<think>")
    if start < 0:
        return 0.0
    between = re.compile(r"</think>[ \n]?<answer>").search(completion, start + len("<think>"))
    if between is None:
        return 0.0
    end = completion.find("</answer>", between.end())
    if end < 0:
        return 0.0
    inside = end + len("</answer>") - start
    return max(0.0, 1.0 - 0.01 * (len(completion) - inside))


def tag_count(completion: str) -> float:
    """0.25 for each of <think>, </think>, <answer>, </answer> that occurs exactly once."""
    return 0.25 * sum(completion.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def boxed_format(completion: str) -> float:
    r"""1 if the completion holds a closed, non-empty `\boxed{}`, else 0."""
    return float(last_boxed(completion) is not None)


def soft_overlong(completion_ids: Sequence[int] | None, *, max_tokens: int, soft_tokens: int) -> float:
    """Penalty for length in tokens (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_tokens - soft_tokens`, falling in a line to -1 at `max_tokens` and beyond.
    """
    if completion_ids is None:
        raise ValueError("soft_overlong counts tokens: the request needs completion_ids")
    if not 0 < soft_tokens <= max_tokens:
        raise ValueError(f"options.soft_tokens = {soft_tokens}: must lie in 1..max_tokens ({max_tokens})")
    return -min(1.0, max(0.0, (len(completion_ids) - (max_tokens - soft_tokens)) / soft_tokens))


BUILTINS: dict[str, BuiltinReward] = {
    "math_answer": BuiltinReward(math_answer, (0.0, 1.0), warm_up=answer_equality.warm_up),
    "exact_match": BuiltinReward(exact_match, (0.0, 1.0)),
    "think_answer_format": BuiltinReward(think_answer_format, (0.0, 1.0)),
    "tag_count": BuiltinReward(tag_count, (0.0, 1.0)),
    "boxed_format": BuiltinReward(boxed_format, (0.0, 1.0)),
    "soft_overlong": BuiltinReward(soft_overlong, (-1.0, 0.0)),
}


def _required(answer: str | None, reward: str) -> str:
    if answer is None or not answer.strip():
        raise ValueError(f"{reward} needs the row's answer: name its column in data.answer")
    return answer
