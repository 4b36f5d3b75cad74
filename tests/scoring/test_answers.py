r"""Finding the final answer in a text."""

from fractions import Fraction

import pytest

from pods_cluster.scoring.final_answer import (
    delimited_answer,
    gold_answer,
    last_boxed,
    last_formula,
    last_number,
    parse_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("There are 18 left.", 18),
        ("18.", 18),
        ("so she pays $1,800", 1800),
        ("so she pays \\$1{,}800.", 1800),
        ("it is 25%", 25),
        ("it is 25\\%", 25),
        ("x = -18", -18),
        ("x = - 18", -18),
        ("a loss of -$5", -5),
        ("a loss of $-5", -5),
        ("from 10-3", 3),
        ("16 - 3 - 4 = 9", 9),
        ("- 5 apples", 5),
        ("\u22127", -7),
        ("costs 7.50", Fraction(15, 2)),
        (".5", Fraction(1, 2)),
        ("about 3/4", Fraction(3, 4)),
        ("is \\frac{1}{2}", Fraction(1, 2)),
        ("is -\\frac12", Fraction(-1, 2)),
        ("is $6\\frac15$", Fraction(31, 5)),
        ("1.5e3", 1500),
        ("18 cm^2", 18),
        ("18 m2", 18),
        ("weighs 5kg", 5),
        ("first 1, 2", 2),
        ("1,234,567.25 in all", Fraction(123456725, 100)),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "no number here", "x^2", "a_1", "5x", "2.5x", "2/0", "1e999999999"])
def test_text_without_a_number(text):
    assert last_number(text) is None


def test_a_huge_number_does_not_stall():
    assert last_number("9" * 5000) is None
    assert parse_number("9" * 5000) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,800", 1800),
        ("$18", 18),
        ("25\\%", 25),
        ("18.", 18),
        ("18.00", 18),
        ("-3/4", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("90^\\circ", 90),
        ("2/4", Fraction(1, 2)),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "18 eggs", "3 18", "2\\sqrt{3}", "5x", "1,8000", "x=5", "1/0"])
def test_more_than_a_number_is_not_a_number(text):
    assert parse_number(text) is None


def test_boxed_braces_nest():
    assert last_boxed("so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{\\left\\{1, \\frac{1}{2}\\right\\}}") == "\\left\\{1, \\frac{1}{2}\\right\\}"
    assert last_boxed("\\fbox{3}") == "3"
    assert last_boxed("\\boxed 5.") == "5"


def test_last_closed_box_counts():
    assert last_boxed("\\boxed{1} then \\boxed{2}") == "2"
    assert last_boxed("\\boxed{1} then \\boxed{2") == "1"
    assert last_boxed("\\boxed{1} then \\boxed{}") == "1"
    assert last_boxed("\\boxed{\\frac{1}{2}") is None


def test_answer_tag_must_be_closed():
    assert delimited_answer("<answer>1</answer><answer>\n2 </answer>", "answer_tag") == "2"
    assert delimited_answer("<answer>18", "answer_tag") is None


def test_the_marker_that_starts_last_is_the_answer():
    assert delimited_answer("\\boxed{5} #### 6\n<answer>7</answer>") == "7"
    assert delimited_answer("<answer>7</answer> \\boxed{5}") == "5"
    assert delimited_answer("<answer>so \\boxed{5}</answer>") == "5"
    assert delimited_answer("<answer>#### 5</answer>") == "5"
    assert delimited_answer("just 5") is None


def test_gold_of_each_kind():
    assert gold_answer("She has 9 * 2 = $<<9*2=18>>18.\n#### 18") == "18"
    assert gold_answer("Then $x=\\boxed{1}$, hence $y=\\boxed{\\frac{1}{\\sqrt{2}}}$.") == "\\frac{1}{\\sqrt{2}}"
    assert gold_answer(" 18 ") == "18"
    assert gold_answer("$\\frac{1}{2}$") == "\\frac{1}{2}"


def test_last_formula_and_what_follows():
    assert last_formula("first $a$, then $$b + c$$ and so on") == ("b + c", " and so on")
    assert last_formula("is \\(x\\)") == ("x", "")
    assert last_formula("costs \\$5 and \\$6") is None
