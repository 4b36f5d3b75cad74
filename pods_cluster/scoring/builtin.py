"""The built-in rewards. Each scores one completion, some against the row's answer, and declares its range."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pods_cluster.scoring import answer_equality
from pods_cluster.scoring.final_answer import (
    Where,
    choice_in,
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
    """A built-in reward with its range (None: as the configuration declares it) and, where loading takes time, a function
    that loads what it needs.

    The positional parameters of `function` name the fields of a request that it reads (`completion`, `answer`,
    `completion_ids`, `environment_reward`); its options are keyword-only.
    """

    function: Callable[..., float | None]
    range: tuple[float, float] | None
    warm_up: Callable[[], None] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of a request that the reward reads."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY)


def math_answer(completion: str, answer: str | None, *, where: Where = "any") -> float:
    r"""Score 1 if the final answer of the completion equals the row's answer, else 0 (GSM8K, MATH).

    The final answer is the last of `\boxed{}`, `<answer>` and `####`. Without any of these it is the last number where
    the row's answer is a number, else the last formula or what follows "answer is". `where` (`boxed`, `answer_tag`,
    `hash`) accepts one kind of delimiter alone.
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


def choice_answer(completion: str, answer: str | None, *, where: Where = "any") -> float:
    r"""Score 1 if the completion names the row's choice (its label, as B, or a word, as True), else 0.

    The choice stands in the last of `\boxed{}`, `<answer>` and `####`, else after the last "answer is"; `where` (`boxed`,
    `answer_tag`, `hash`) accepts one kind of delimiter alone. `B`, `(B)`, `b.`, `B) its text` and `option B` are B; two
    choices are none.
    """
    gold = _required(answer, "choice_answer").strip().casefold()
    given = delimited_answer(completion, where)
    if given is None and where == "any":
        given = last_statement(completion)
    return float(given is not None and choice_in(given) == choice_in(gold))


def exact_match(completion: str, answer: str | None) -> float:
    """Score 1 if the completion is the row's answer, apart from white space around both, else 0."""
    return float(completion.strip() == _required(answer, "exact_match").strip())


def think_answer_format(completion: str) -> float:
    """Score a think block followed by an answer block: max(0, 1 - 0.01 x characters outside both).

    At most one space or newline may stand between the blocks; without the blocks the score is 0. This is the format
    reward of the PODS experiments (arXiv 2504.13818, section 4). It takes time linear in the completion's length.
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
    """Score 0.25 for each of <think>, </think>, <answer>, </answer> that occurs exactly once."""
    return 0.25 * sum(completion.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def boxed_format(completion: str) -> float:
    r"""Score 1 if the completion holds a closed, non-empty `\boxed{}`, else 0."""
    return float(last_boxed(completion) is not None)


def soft_overlong(completion_ids: Sequence[int] | None, *, max_tokens: int, soft_tokens: int) -> float:
    """Penalise length in tokens (DAPO, arXiv 2503.14476, eq. 13).

    The score is 0 up to `max_tokens - soft_tokens`, falls linearly to -1 at `max_tokens`, and stays there.
    """
    if completion_ids is None:
        raise ValueError("soft_overlong counts tokens: the request needs completion_ids")
    if not 0 < soft_tokens <= max_tokens:
        raise ValueError(f"soft_tokens: {soft_tokens} must be from 1 to max_tokens: {max_tokens}")
    return -min(1.0, max(0.0, (len(completion_ids) - (max_tokens - soft_tokens)) / soft_tokens))


def environment(environment_reward: float | None) -> float | None:
    """Score what the rollout's environment gave in `reward()`; where that is None the rollout has no such reward."""
    return environment_reward


BUILTINS: dict[str, BuiltinReward] = {
    "math_answer": BuiltinReward(math_answer, (0.0, 1.0), warm_up=answer_equality.warm_up),
    "choice_answer": BuiltinReward(choice_answer, (0.0, 1.0)),
    "exact_match": BuiltinReward(exact_match, (0.0, 1.0)),
    "think_answer_format": BuiltinReward(think_answer_format, (0.0, 1.0)),
    "tag_count": BuiltinReward(tag_count, (0.0, 1.0)),
    "boxed_format": BuiltinReward(boxed_format, (0.0, 1.0)),
    "soft_overlong": BuiltinReward(soft_overlong, (-1.0, 0.0)),
    "environment": BuiltinReward(environment, None),
}


def _required(answer: str | None, reward: str) -> str:
    if answer is None or not answer.strip():
        raise ValueError(f"{reward} needs the row's answer: name its column in data.answer")
    return answer
