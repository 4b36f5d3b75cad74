r"""Finding the final answer in a text: in `\boxed{}` or `<answer>`, after `####`, or as the last number or formula.

A completion may hold several of these delimiters; the one that starts last counts, as for a reader. An unclosed
`\boxed{` or `<answer>` (a truncated completion) does not count.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from functools import lru_cache
from typing import Literal

Where = Literal["any", "boxed", "answer_tag", "hash"]

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z0-9]))?"
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*(?P<up>-?\d+)\s*\}\s*\{\s*(?P<down>\d+)\s*\}|(?P<up1>\d)\s*(?P<down1>\d)(?!\d))"
# A minus is a sign, not a subtraction, when nothing that could be subtracted from stands directly before it.
_SIGN = r"(?<![\w.)\]}%])[-+]\$?|(?<![\w.)\]}%])\$[-+]|(?<=[=:(] )[-+] \$?"
# Not a number of its own: the digits of x2, cm^2, a_1, 5x (but 5kg, 5m, 5s are five).
_NUMBER_IN_TEXT = re.compile(
    rf"(?P<sign>{_SIGN})?"
    rf"(?:(?:(?P<whole>(?<![A-Za-z0-9^_.,])\d+)\s*)?{_FRACTION}"
    rf"|(?<![A-Za-z0-9^_])(?<![\^_]\{{)(?P<number>{_UNSIGNED})(?:\s?/\s?(?P<below>\d+)(?!\d))?"
    rf"(?![.,]?\d)(?![a-fi-kn-rt-zA-KM-Z](?![A-Za-z])))"
)
_WHOLE_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<whole>\d+)\s*)?{_FRACTION}$|"
    rf"(?P<sign2>[-+]?)(?:(?P<whole2>\d+)\s+)?(?P<above>{_UNSIGNED})(?:\s*/\s*(?P<below>\d+))?$"
)
_MATH_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+?)(?<!\\)\$", re.DOTALL)
_TEN_TO = re.compile(r"\s*(?:\\times|\\cdot|[×·*])\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))$")
_REPEATING = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*\{?(?P<again>\d+)\}?$")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words that multiply the number before them, as powers of ten."""
_SCALE = re.compile(
    r"(?<=[\d})])(?:\s|\\[ ,;:!])*(?:\\(?:text|mbox|mathrm|textrm)\s*\{\s*)?(?P<word>"
    + "|".join(SCALES)
    + r")s?(?![A-Za-z])"
    r"(?P<behind>[^{}]*)\}?",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"(?:(?:the|option|choice|answer) )*[(\[]?(?P<label>[a-z])(?:[.):\]]+(?P<rest> .*)?)?")
_AND_ANOTHER = re.compile(r"(?:or|and) ")
_ANSWER_PHRASE = re.compile(r"\banswer\s*(?:is|are|:|=)\s*:?\s*([^\n]+)", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed, non-empty `\boxed{}` or `\fbox{}`; braces nest, escaped braces do not count."""
    found = _last_boxed(text)
    return None if found is None else found[1]


def delimited_answer(text: str, where: Where = "any") -> str | None:
    """Return the answer between delimiters of kind `where`; `any` takes the kind that starts last.

    Raises ValueError for another `where`.
    """
    finders = {"boxed": _last_boxed, "answer_tag": _last_answer_tag, "hash": _last_hash}
    if where != "any":
        if where not in finders:
            raise ValueError(f"where: {where!r} must be one of any, {', '.join(finders)}")
        finders = {where: finders[where]}
    found = [hit for finder in finders.values() if (hit := finder(text)) is not None]
    return max(found)[1] if found else None


def gold_answer(text: str) -> str:
    r"""The reference answer: a GSM8K solution (`… #### 18`), a MATH solution (last `\boxed{}`), or a bare answer."""
    delimited = delimited_answer(text)
    answer = " ".join((text if delimited is None else delimited).split())
    segment = _MATH_SEGMENT.fullmatch(answer)
    return next(group for group in segment.groups() if group is not None).strip() if segment else answer


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or None: thousands commas, currency, percent, signs and fractions understood."""
    last = _last_match(_NUMBER_IN_TEXT, _plain(text))
    if last is None:
        return None
    sign = -1 if "-" in (last["sign"] or "") else 1
    if last["number"] is not None:
        value = _value(sign, None, last["number"], last["below"])
    else:
        value = _value(sign, last["whole"], last["up"] or last["up1"], last["down"] or last["down1"])
    scale = _SCALE.match(last.string, last.end())
    return value * 10 ** SCALES[scale["word"].lower()] if value is not None and scale else value


def parse_number(text: str) -> Fraction | None:
    r"""The value of a text that is one number and nothing else, exactly, or None.

    Understands `1,800`, `$18`, `25\%` (as 25), `18.`, `-3/4`, `\frac{3}{4}`, `1\frac{1}{2}`, `1 1/2`, `90^\circ`,
    `1.5\times 10^6`, `0.\overline{3}`, `5\text{ million}`.
    """
    if (scale := _SCALE.search(text)) is not None:
        rest = scale["behind"].strip(" .$").casefold()
        value = parse_number(text[: scale.start()]) if rest in ("", "dollars", "dollar") else None
        return None if value is None else value * 10 ** SCALES[scale["word"].lower()]
    if (power := _TEN_TO.search(text.strip().strip("$").rstrip("."))) is not None:
        value = parse_number(text.strip().strip("$")[: power.start()])
        return None if value is None else value * Fraction(10) ** int(power[1] or power[2])
    plain = _plain(text).strip().rstrip(".").replace("$", "").replace("%", "").replace("°", "")
    plain = re.sub(r"\^\{?\\circ\}?|\\(?:left|right)\b", "", plain).strip()
    plain = re.sub(r"^([-+])\s+", r"\1", plain)
    if (repeating := _REPEATING.match(plain)) is not None:
        return _repeating(repeating)
    match = _WHOLE_NUMBER.match(plain)
    if match is None:
        return None
    sign = -1 if "-" in (match["sign"] or match["sign2"] or "") else 1
    if match["above"] is not None:
        if match["whole2"] is not None and match["below"] is None:
            return None  # "3 18" is two numbers
        return _value(sign, match["whole2"], match["above"], match["below"])
    return _value(sign, match["whole"], match["up"] or match["up1"], match["down"] or match["down1"])


def last_formula(text: str) -> tuple[str, str] | None:
    r"""Content of the last `$…$`, `$$…$$`, `\(…\)` or `\[…\]`, and the text behind it."""
    last = _last_match(_MATH_SEGMENT, text)
    if last is None:
        return None
    return next(group for group in last.groups() if group is not None).strip(), text[last.end() :]


def last_statement(text: str) -> str | None:
    """Return what follows the last "answer is", without a full stop; else the whole of a short one-line text."""
    last = _last_match(_ANSWER_PHRASE, text)
    if last is not None:
        return last[1].strip().rstrip(".")
    whole = text.strip()
    return whole.rstrip(".") if whole and "\n" not in whole and len(whole) <= 200 else None


def choice_in(text: str) -> str:
    r"""The label of the choice that a short text names, in lower case: `b` of `B`, `(B)`, `B) its text`, `\text{B}`, `option B`.
    A text that names none, or several, is returned whole, without marks around it."""
    plain = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", " ".join(text.split()))
    plain = plain.strip("$*_ ").casefold()
    match = _CHOICE.fullmatch(plain)
    rest = "" if match is None else (match["rest"] or "").strip("$*_ ")
    if match is None or _AND_ANOTHER.match(rest) or _CHOICE.fullmatch(rest):
        return plain.rstrip(".")
    return match["label"]


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _plain(text: str) -> str:
    """LaTeX spellings of thousands commas, dollar, percent and minus made plain."""
    for spelled, plain in (("{,}", ","), (r"\!", ""), (r"\$", "$"), (r"\%", "%"), ("\u2212", "-"), ("\u00a0", " ")):
        text = text.replace(spelled, plain)
    return re.sub(r"(?<=\d)\\[,;: ](?=\d{3})", "", text)


def _value(sign: int, whole: str | None, above: str, below: str | None) -> Fraction | None:
    """sign x (whole + above / below)."""
    if sum(len(part or "") for part in (whole, above, below)) > 400 or re.search(r"[eE][+-]?\d{4,}", above):
        return None  # a number that long is no answer, and its power of ten would fill memory
    divisor = int(below or 1)
    return None if divisor == 0 else sign * (int(whole or 0) + Fraction(above.replace(",", "")) / divisor)


def _repeating(match: re.Match[str]) -> Fraction | None:
    """A decimal whose last digits repeat for ever: 0.1(6) = 1/10 + 6/90."""
    whole, once, again = match["whole"] or "0", match["once"], match["again"]
    if len(whole) + len(once) + len(again) > 100:
        return None
    value = Fraction(int(whole + once or "0"), 10 ** len(once)) + Fraction(
        int(again), 10 ** len(once) * (10 ** len(again) - 1)
    )
    return -value if match["sign"] == "-" else value


def _last_boxed(text: str) -> tuple[int, str] | None:
    end = len(text)
    while (start := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        match = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
        if match and (content := _balanced(text, match.end())) is not None and content.strip():
            return match.end(), content.strip()
        if bare := re.compile(r"\\boxed\s+([^\s{}$\\]+)").match(text, start):  # \boxed 5
            return bare.start(1), bare[1].rstrip(".,;")
        end = start
    return None


@lru_cache(maxsize=64)
def _braces(text: str) -> tuple[tuple[int, int], ...]:
    """Positions of unescaped braces, +1 opening and -1 closing."""
    matches = re.finditer(r"(?<!\\)(?:\\\\)*[{}]", text)
    return tuple((match.end() - 1, 1 if match[0][-1] == "{" else -1) for match in matches)


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for position, step in _braces(text):
        if position >= start:
            depth += step
            if depth == 0:
                return text[start:position]
    return None


def _last_answer_tag(text: str) -> tuple[int, str] | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else (start + len("<answer>"), text[start + len("<answer>") : end].strip())


def _last_hash(text: str) -> tuple[int, str] | None:
    start = text.rfind("####")
    if start < 0:
        return None
    rest = text[start + 4 :].lstrip(" \t\n")
    content = re.split(r"\n|</", rest, maxsplit=1)[0].strip()
    return (start + 4, content) if content else None
