r"""The values that an answer states, and whether a formula is too large for a computer algebra system.

`17 or 18`, `x=3, x=5` and `\{1, 2\}` state several values; no one of them is the answer. `9 * 2 = 18` and
`16 (out of 20)` state one. Pure text work: nothing here evaluates a formula.
"""

from __future__ import annotations

import math
import re

from pods_cluster.scoring.final_answer import parse_number

LARGEST_EXPONENT = 5_000
"""A number raised to more than this is no answer that anyone writes, and takes gigabytes to evaluate."""
LARGEST_FACTORIAL = 2_000

_WORDY = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{\s*([^{}]*?)\s*\}"
# A comma between three digits and digits before it groups thousands: 1,800 is one number.
_SEPARATOR = re.compile(
    r"\s*(?:;|&|(?<!\d),|,(?!\d{3}(?!\d))|(?<=\d),(?=\d{3}(?:,\d{1,2})+(?!\d))"
    r"|\b(?:or|and|to|versus|vs\.?)\b|\\(?:quad|qquad)\b)\s*",
    re.IGNORECASE,
)
_LEAD = re.compile(r"^(?:either|both|between|from|maybe|perhaps|possibly|about|approximately|and|or)\s+", re.IGNORECASE)
_NAMED = re.compile(r"^\\?[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\approx|≈)\s*(?=\S)")
_UNIT_BEHIND = re.compile(r"(?<=[\d})])\s*(?:[A-Za-z]+\.?\s?){1,2}$")
_SIGNS_BEFORE = re.compile(r"^(?:\\(?:approx|simeq|sim|cong|pm|mp)(?![A-Za-z])|[≈≃~=±]|:)\s*")
_APPROXIMATE = re.compile(r"^\s*(?:\\(?:approx|simeq|sim|cong)(?![A-Za-z])|[≈≃~])\s*")
_ASIDE = re.compile(r"(?<=\S)\s+\([A-Za-z]{2}[^()\\=]*\)|(?<=\d)\s+out\s+of\s+\$?[\d,.]*\d", re.IGNORECASE)


def without_asides(text: str) -> str:
    """A text without its signs of approximation, remarks in brackets and totals: `≈ 16 (out of 20)` is `16`."""
    text = re.sub(r"\\text\s*\{\s*(out\s+of)\s*\}\s*", r" \1 ", text)
    return _ASIDE.sub("", _APPROXIMATE.sub("", text)).strip()


def stated_values(text: str) -> list[str]:
    r"""The values that stand side by side in an answer: `x=3, x=5` gives `3` and `5`; one value, prose or a
    calculation gives at most one.

    A value may have a name before it and a unit behind it. Steps of a calculation (`16 - 7 = 9, 9 * 2 = 18`) are none.
    """
    plain = re.sub(_WORDY, r" \1 ", text.replace("{,}", ",").replace("\\$", "$")).strip().strip("$").rstrip(".").strip()
    plain = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[!;: ]", "", plain)
    plain = re.sub(r"^\\?[A-Za-z]\s*\\in\s*", "", plain)
    if brackets := re.fullmatch(r"(?:\\\{(.*)\\\}|[(\[{](.*)[)\]}])", plain, re.DOTALL):
        plain = next(group for group in brackets.groups() if group is not None)
    found = [_value(part) for part in _SEPARATOR.split(plain)]
    return [value for value in found if value is not None]


def states_several(text: str) -> bool:
    """Whether an answer states two or more different values."""
    values = {parse_number(value) for value in stated_values(text)}
    return len(values) > 1


def too_large_to_evaluate(text: str) -> bool:
    r"""Whether evaluating a formula could take minutes or fill memory: `9^{9^{9^9}}`, `(10^9)!`, `2^{1000000}`.

    Only numbers count: `e^{x^2}` is harmless.
    """
    plain = re.sub(r"\s+|\\(?:left|right|,|!|;)(?![A-Za-z])", "", text)
    if re.search(r"\d{400}", plain):
        return True
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|\{,\}", "", plain)
    plain = re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "*", plain)
    exponents = [_exponent(plain, match.end()) for match in re.finditer(r"\^|\*\*", plain)]
    numeric = [_size(exponent) for exponent in exponents if not re.search(r"[A-Za-z\\]", exponent)]
    if any(size > LARGEST_EXPONENT for size in numeric):
        return True
    product = 1.0
    for size in numeric:
        product *= max(size, 1.0)
    if product > LARGEST_EXPONENT and len(numeric) > 1 and re.search(r"[)}\]]\^|[)}\]]\*\*", plain):
        return True  # a power of a power
    for match in re.finditer(r"!", plain):
        before = plain[: match.start()]
        if before.endswith((")", "]", "}", "!")):
            inside = re.search(r"[\d.]+(?=[)\]}!]*$)", before)
            if "^" in before or "!" in before or re.search(r"\d{4}", before) or inside is None:
                return True
        elif (number := re.search(r"(\d+)$", before)) and int(number[1]) > LARGEST_FACTORIAL:
            return True
    large = r"\\(?:d?binom|tbinom|sum|prod|int|lim|gcd|operatorname)(?![A-Za-z])"
    powers = re.finditer(r"(\d+)(?:\^|\*\*)[{(]?(\d+)", plain)
    return bool(re.search(large, plain)) and (
        re.search(r"\d{6}", plain) is not None
        or any(int(power[2]) * math.log10(max(int(power[1]), 1)) >= 6 for power in powers)
    )


def _value(part: str) -> str | None:
    part = without_asides(_LEAD.sub("", _LEAD.sub("", part.strip())))
    part = _SIGNS_BEFORE.sub("", _NAMED.sub("", part)).strip().strip("$")
    for spelled in (part, _UNIT_BEHIND.sub("", part).strip()):
        if parse_number(spelled) is not None:
            return spelled
    return None


def _exponent(text: str, start: int) -> str:
    """The exponent that begins at `start`: a group in brackets, or the run of digits and powers that follows."""
    opened = {"{": "}", "(": ")"}
    if start < len(text) and text[start] in opened:
        depth, close = 0, opened[text[start]]
        for position in range(start, len(text)):
            depth += (text[position] == text[start]) - (text[position] == close)
            if depth == 0:
                return text[start + 1 : position]
        return text[start + 1 :]
    match = re.compile(r"[-+]?[\d.]+(?:(?:\^|\*\*)[-+{(]?[\d.^{}()*]+)?|.").match(text, start)
    return match[0] if match else ""


def _size(exponent: str) -> float:
    """An upper bound of a numeric exponent; infinity for a tower that is too high to say."""
    base, power, above = re.sub(r"[{}()\[\]]", "", exponent).replace("**", "^").partition("^")
    digits = re.sub(r"[^\d.*/+-]", "", base)
    try:
        parts = [abs(float(number)) for number in re.findall(r"[\d.]+", digits)]
    except ValueError:
        return float("inf")
    product = 1.0
    for number in parts:
        product *= max(number, 1.0)
    size = product if re.search(r"[*]", digits) else sum(parts)
    if not power:
        return size
    higher = _size(above)
    try:
        return size**higher if higher < 1e3 else float("inf") if size > 1 else size
    except OverflowError:
        return float("inf")
