r"""Comparison of two mathematical answers: as exact numbers, then by spelling, then by meaning (math-verify).

Numbers are compared as exact fractions (2/4 = 1/2 = 0.5, 1,800 = 1800), percent and degree signs left aside. Only
what neither numbers nor spelling settle goes to math-verify, which is imported on first use (about 0.8 s) and runs
without its own timeouts: they need SIGALRM, hence a main thread; the scorer process is killed from outside instead.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pods_cluster.scoring.final_answer import last_formula, last_number, parse_number
from pods_cluster.scoring.stated_values import stated_values, states_several, too_large_to_evaluate, without_asides

# A candidate far longer than the reference is no restatement of it, and symbolic parsing is worse than linear.
_LONGEST_CANDIDATE = 300

_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'-])+")
_UNIT = re.compile(r"(?<=[\d})])\\(?:text|mbox|mathrm|textrm)\{\s*[A-Za-z .\n]+\}(?:\^\{?\d\}?)?$")
# "18 cm^2", "18 miles/hour (mph)": no formulas.
_ASIDE = re.compile(r"\b(?:[cmk]?m|in|ft|yd|mi|inch(?:es)?|feet|meters?|units?)\^\{?[23]\}?|\s\([A-Za-z .]+\)")
_OTHER_BASE = re.compile(r"\d_\{?(?!10\b)\d")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}")


@lru_cache(maxsize=8192)
def answers_equal(gold: str, candidate: str) -> bool:
    """Whether `candidate` (the final answer of a completion) states the same as `gold` (a bare reference answer).

    A numeric gold also accepts prose around one number ("18 eggs", "x = $18"): the last number of the prose counts.
    """
    candidate = without_asides(candidate)
    if not candidate:
        return False
    gold_number, candidate_number = parse_number(gold), parse_number(candidate)
    if gold_number is not None and candidate_number is not None:
        return gold_number == candidate_number or _as_share(gold) == _as_share(candidate)
    if _name(gold) and _name(candidate) and _name(gold) != _name(candidate):
        return False  # x=5 is not y=5
    if _is_tuple(gold) != _is_tuple(candidate) and len(stated_values(gold)) > 1 and _listed(gold) == _listed(candidate):
        return False  # (1,2) is a point, 1,2 are two values
    gold_text, candidate_text = normalise(gold), normalise(candidate)
    if gold_text == candidate_text:
        return True
    if gold_number is not None:
        if (number := parse_number(candidate_text)) is not None:
            return gold_number == number
        if states_several(candidate):
            return False  # 17 or 18: none of them is the answer
        if is_prose(candidate):
            return last_number(_right_side(candidate)) == gold_number
    gold_word, candidate_word = _word(gold_text), _word(candidate_text)
    if gold_word and candidate_word:  # words are names, never products of their letters
        return gold_word == candidate_word
    if "_" not in gold and _OTHER_BASE.search(candidate):
        return False  # math-verify reads over the base: 10_7 is not 10
    if len(candidate) > _LONGEST_CANDIDATE + 2 * len(gold):
        return False
    if (formula := last_formula(candidate)) is not None:
        return answers_equal(gold, formula[0])
    if too_large_to_evaluate(candidate):
        return False
    return _same_meaning(gold, candidate)


def _as_share(text: str) -> Fraction | None:
    """The value of a number, a percentage as its hundredth: 25% is 0.25."""
    value = parse_number(text)
    return value / 100 if value is not None and "%" in text else value


def _name(text: str) -> str | None:
    """The letter that a whole answer is given for: x of `x = 5`."""
    match = re.fullmatch(r"\s*\$?\s*(\\?[A-Za-z]+)\s*=[^=,;]*", text)
    return match[1] if match and (match[1].startswith("\\") or len(match[1]) == 1) else None


def _is_tuple(text: str) -> bool:
    """Whether a text is one pair of round brackets with several entries in it."""
    plain = re.sub(r"\\(?:left|right)(?![A-Za-z])|[\s$]", "", text)
    return bool(re.fullmatch(r"\([^()]*,[^()]*\)", plain))


def _listed(text: str) -> bool:
    """Whether entries stand side by side, in round brackets or in none; a set or an interval does not count."""
    return not re.search(r"[\[\]]|\\[{}]|=|\\in(?![A-Za-z])", text)


def is_prose(text: str) -> bool:
    """Whether a text is words and numbers, not a formula: no LaTeX command, power, product, bracket or open sum."""
    plain = _right_side(text.replace("\\$", "$").replace("\\%", "%"))
    plain = _ASIDE.sub("", _TEXT.sub(r"\1", plain))
    if re.fullmatch(r"[\d\s.,]+!", plain.strip()):
        return False  # a factorial, not a shout
    return not re.search(r"[\\^_{}*()\[\]=<>√π]|\d\s*[+]\s*\d|\d\s+[-/]\s+\d|\d[A-Za-z](?![A-Za-z])", plain)


def normalise(text: str) -> str:
    """One spelling for what LaTeX spells in several ways; spaces, sizing, units and a final full stop removed."""
    text = text.strip().strip("$").rstrip(".").strip()
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|~", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = _UNIT.sub("", re.sub(r"(?<=[\d})])\s+(?=\\(?:text|mbox|mathrm))", "", text))
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°|\\?%|\\?\$", "", text)
    text = text.replace("{,}", ",").replace("\u2212", "-")
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt([A-Za-z\d])", r"\\sqrt{\1}", text)
    text = re.sub(r"^[A-Za-z]=(?=.)", "", text)
    choice = re.fullmatch(r"\(([A-Za-z])\)", text)
    return choice[1] if choice else text


def warm_up() -> None:
    """Import math-verify and build its grammars, so that no scored completion pays for it."""
    _same_meaning(r"\frac{\pi}{2}", r"\pi/2")


def _right_side(text: str) -> str:
    """Return the part after the last `=` when the left side is a name, words or a calculation, else the whole text."""
    left, equals, right = text.rpartition("=")
    if not equals or not right.strip() or re.search(r"\d\s*[A-Za-z]|[A-Za-z]\s*\d|[\\^]", left.replace("\\$", "")):
        return text
    return right


def _word(text: str) -> str | None:
    return text.casefold() if _WORDS.fullmatch(text) else None


@lru_cache(maxsize=8192)
def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    return parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore


def _same_meaning(gold: str, candidate: str) -> bool:
    from math_verify import verify

    parsed = _parse(_for_parser(gold)), _parse(_for_parser(candidate))
    return bool(verify(*parsed, timeout_seconds=None))


def _for_parser(text: str) -> str:
    """A formula without dollar signs, the root of a negative number as a multiple of i."""
    plain = text.replace("\\$", "").replace("$", "")
    return re.sub(r"\\sqrt\{\s*-\s*(\d+)\s*\}", _imaginary, plain)


def _imaginary(match: re.Match[str]) -> str:
    number = int(match[1])
    root = math.isqrt(number)  # the parser leaves the root of a square as it is
    if root * root == number:
        return "i" if root == 1 else f"{root}i"
    return rf"\sqrt{{{number}}}i"
