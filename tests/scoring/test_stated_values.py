r"""Answers that state several values, other names, scales and shapes; spellings of one value; formulas too large."""

import pytest

from pods_cluster.scoring.answer_equality import answers_equal
from pods_cluster.scoring.builtin import math_answer
from pods_cluster.scoring.stated_values import stated_values, states_several, too_large_to_evaluate, without_asides


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("5", "\\boxed{1,2,3,4,5}"),
        ("5", "<answer>3, 5</answer>"),
        ("5", "\\boxed{x=3, x=5}"),
        ("18", "17 or 18"),
        ("18", "<answer>17 or 18</answer>"),
        ("18", "The answer is 17 or 18."),
        ("5", "\\boxed{3 \\text{ or } 5}"),
        ("5", "\\boxed{3\\text{ and }5}"),
        ("5", "#### 3; 5"),
        ("5", "<answer>either 3 or 5</answer>"),
        ("5", "<answer>between 3 and 5</answer>"),
        ("5", "<answer>3 to 5</answer>"),
        ("5", "<answer>3 apples or 5 apples</answer>"),
        ("5", "<answer>$3, $5</answer>"),
        ("5", "\\boxed{\\{3, 5\\}}"),
        ("5", "\\boxed{x \\in \\{3, 5\\}}"),
        ("5", "\\boxed{x_1 = 3, x_2 = 5}"),
        ("5", "\\boxed{\\pm 5}"),
        ("1800", "<answer>1,700 or 1,800</answer>"),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{3}, \\frac{1}{2}}"),
    ],
)
def test_several_values_are_no_answer(gold, completion):
    assert math_answer(completion, gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("18", "<answer>16 - 3 - 4 = 9, 9 * 2 = 18</answer>"),
        ("18", "<answer>18, 18.0</answer>"),
        ("1800", "<answer>1,800</answer>"),
        ("16", "#### 16 (out of 20)"),
        ("16", "<answer>16 out of 20</answer>"),
        ("16", "\\boxed{16 \\text{ out of } 20}"),
        ("5", "\\boxed{\\approx 5}"),
        ("5", "<answer>≈ 5</answer>"),
        ("5", "\\boxed{x \\approx 5}"),
        ("5", "<answer>about 5 apples</answer>"),
        ("3, 5", "\\boxed{5, 3}"),
        ("3, 5", "\\boxed{3 \\text{ and } 5}"),
    ],
)
def test_one_value_however_it_is_put(gold, completion):
    assert math_answer(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "candidate"),
    [
        ("5", "\\$5\\text{ million}"),
        ("5", "5 million"),
        ("5", "5 thousand dollars"),
        ("x=5", "y=5"),
        ("y = 5", "x = 5"),
        ("\\theta=5", "x=5"),
        ("1,2", "(1,2)"),
        ("(1,2)", "1,2"),
        ("1, 2, 3", "\\left(1, 2, 3\\right)"),
        ("0.25", "2.5\\%"),
        ("\\frac13", "0.\\overline{4}"),
        ("\\frac13", "0.3"),
        ("1.5e6", "1.5\\times 10^5"),
        ("i", "\\sqrt{1}"),
    ],
)
def test_other_values(gold, candidate):
    assert not answers_equal(gold, candidate)


@pytest.mark.parametrize(
    ("gold", "candidate"),
    [
        ("5000000", "\\$5\\text{ million}"),
        ("5000000", "5 million"),
        ("5 million", "5,000,000"),
        ("2500", "2.5 thousand dollars"),
        ("x=5", "x = 5"),
        ("x=5", "5"),
        ("(1,2)", "\\left( 1, 2 \\right)"),
        ("\\{1,2\\}", "1, 2"),
        ("1.5e6", "1.5\\times 10^6"),
        ("1500000", "1.5 \\cdot 10^{6}"),
        ("0.0015", "1.5 × 10^{-3}"),
        ("0.25", "25\\%"),
        ("25\\%", "0.25"),
        ("25", "25\\%"),
        ("\\frac14", "25\\%"),
        ("\\frac13", "0.\\overline{3}"),
        ("\\frac{1}{6}", "0.1\\overline{6}"),
        ("0.\\overline{09}", "\\frac{1}{11}"),
        ("-\\frac{4}{3}", "-1.\\overline{3}"),
        ("i", "\\sqrt{-1}"),
        ("2i", "\\sqrt{-4}"),
        ("i\\sqrt{2}", "\\sqrt{-2}"),
        ("3+2i", "3 + \\sqrt{-4}"),
    ],
)
def test_spellings_of_one_value(gold, candidate):
    assert answers_equal(gold, candidate)


@pytest.mark.parametrize(
    "monster",
    [
        "9^{9^{9^9}}",
        "9^9^9^9",
        "(10^9)!",
        "10^{10^{10}}",
        "2^{1000000}",
        "100000000!",
        "((10!)!)!",
        "(9^{999})^{999}",
        "\\binom{10000000}{5000000}",
        "\\binom{10^9}{5\\cdot 10^8}",
        "\\sum_{k=1}^{100000000} k!",
        "7^{9999999 \\cdot 9999999}",
        "2**99999999",
    ],
)
def test_monsters_are_refused_before_they_are_evaluated(monster):
    assert too_large_to_evaluate(monster)
    assert math_answer(f"\\boxed{{{monster}}}", "5") == 0.0


def test_a_monster_beside_an_ordinary_term_is_refused():
    assert not answers_equal("7", "9^{9^{9^{9}}} + 1")


@pytest.mark.parametrize(
    "formula",
    [
        "e^{x^2}",
        "2^{3^2}",
        "2^{100}",
        "10!",
        "x^{n+1}",
        "\\frac{1}{2}",
        "5^{2n}",
        "\\binom{10}{3}",
        "20! / 18!",
        "\\sum_{k=1}^{5} 2^{17}",
    ],
)
def test_ordinary_formulas_are_not_refused(formula):
    assert not too_large_to_evaluate(formula)


def test_values_side_by_side():
    assert stated_values("x=3, x=5") == ["3", "5"]
    assert stated_values("1,800") == ["1,800"]
    assert stated_values("She has 18 left") == []
    assert not states_several("18, 18.00")
    assert without_asides("≈ 16 (out of 20)") == "16"
