r"""What the built-in rewards say of completions, the mistakes of earlier graders among them."""

import pytest

from pods_cluster.scoring.answer_equality import answers_equal
from pods_cluster.scoring.builtin import (
    BUILTINS,
    boxed_format,
    choice_answer,
    exact_match,
    math_answer,
    soft_overlong,
    tag_count,
    think_answer_format,
)

GSM8K = "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    "completion",
    [
        "#### 18",
        "There are 18 left.",
        "She makes $18.",
        "She makes $18.00 every day.",
        "so 9 * 2 = 18",
        "<think>9 or 7?</think>\n<answer>18</answer>",
        "<answer>$18</answer>",
        "<answer>18 dollars</answer>",
        "<answer>She has 18 left.</answer>",
        "<answer>16 - 3 - 4 = 9, 9 * 2 = 18</answer>",
        "<answer>x = 18</answer>",
        "<answer>\\(18\\)</answer>",
        "<answer>the area is 18 cm^2</answer>",
        "<answer>18 miles/hour (mph)</answer>",
        "**18**",
        "<answer>(18)</answer>",
        "Hence \\boxed{18}.",
        "Hence \\boxed{18\\text{ dollars}}.",
        "Hence \\boxed{\\$18}.",
        "Hence \\boxed{\\frac{36}{2}}.",
        "Hence \\boxed{9 \\cdot 2}.",
        "The final answer is $18$. I hope it is right.",
        "We get $x = 18$",
        "I count 9 first.\n#### 18\n",
    ],
)
def test_right_answers(completion):
    assert math_answer(completion, GSM8K) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "no number",
        "-18",
        "#### -18",
        "<answer>-18</answer>",
        "18 or 19",
        "#### 18\nno, #### 19",
        "\\boxed{18} is wrong, it is \\boxed{19}",
        "\\boxed{18x}",
        "\\boxed{18!}",
        "\\boxed{18^2}",
        "\\boxed{18_9}",
        "\\boxed{18\\pi}",
        "\\boxed{-\\frac{36}{2}}",
        "\\boxed{2\\sqrt{18}}",
        "The answer is $2\\sqrt{18}$.",
        "\\boxed{18, 19}",
        "<answer></answer>",
        "180",
        "1.8",
        "0.18",
        "x^18",
    ],
)
def test_wrong_answers(completion):
    assert math_answer(completion, GSM8K) == 0.0


def test_no_number_does_not_match_minus_one():
    assert math_answer("I do not know", "-1") == 0.0
    assert math_answer("it is -1.", "-1") == 1.0


def test_a_fraction_as_gold_is_not_cut_at_its_first_brace():
    solution = "Half of them, so the answer is $\\boxed{\\frac{1}{2}}$."
    assert math_answer("\\boxed{\\frac{1}{2}}", solution) == 1.0
    assert math_answer("\\boxed{\\frac{1}{3}}", solution) == 0.0
    assert math_answer("\\boxed{\\frac{1", solution) == 0.0


@pytest.mark.parametrize(
    ("gold", "candidate"),
    [
        ("\\frac{1}{2}", "2/4"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "\\dfrac12"),
        ("1800", "1,800"),
        ("25", "25\\%"),
        ("90", "90^\\circ"),
        ("5", "x = 5"),
        ("\\text{Evelyn}", "evelyn"),
        ("\\text{(C)}", "C"),
        ("(3, \\frac{\\pi}{2})", "\\left(3,\\pi/2\\right)"),
        ("11\\sqrt{2}", "\\sqrt{242}"),
        ("2k+2", "2(k+1)"),
        ("6-5i", "-5i+6"),
        ("1, 2, 3", "3, 2, 1"),
        ("[-2,7]", "x \\in [-2,7]"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("5\\text{ cm}", "5"),
        ("x^2 + \\sqrt{2}", "The result is $\\sqrt2 + x^2$."),
    ],
)
def test_equal_answers(gold, candidate):
    assert answers_equal(gold, candidate)


@pytest.mark.parametrize(
    ("gold", "candidate"),
    [
        ("\\frac{1}{2}", "\\frac{2}{1}"),
        ("\\text{Evelyn}", "Evnley"),  # not a product of letters
        ("5", "5x"),
        ("3", "2\\sqrt{3}"),
        ("(1,2)", "(2,1)"),
        ("[1,2)", "(1,2]"),
        ("2k+2", "2k+1"),
        ("\\pi", "3.14"),
        ("18", ""),
        ("x", "x" * 5000),
    ],
)
def test_unequal_answers(gold, candidate):
    assert not answers_equal(gold, candidate)


def test_where_accepts_one_marker_alone():
    assert math_answer("#### 18", "18", where="boxed") == 0.0
    assert math_answer("\\boxed{18} #### 19", "18", where="boxed") == 1.0
    assert math_answer("<answer>18</answer> or \\boxed{19}", "18", where="answer_tag") == 1.0
    assert math_answer("18", "18", where="hash") == 0.0


def test_latex_answers_without_a_marker():
    assert math_answer("The final answer is $\\frac{\\pi}{2}$.", "\\frac{\\pi}{2}") == 1.0
    assert math_answer("The answer is Evelyn.", "\\text{Evelyn}") == 1.0
    assert math_answer("\\pi/2", "\\frac{\\pi}{2}") == 1.0
    assert math_answer("The answer is Bob.", "\\text{Evelyn}") == 0.0


def test_exact_match_ignores_outer_white_space_only():
    assert exact_match(" 46\n", "46") == 1.0
    assert exact_match("46.", "46") == 0.0
    assert exact_match("046", "46") == 0.0


@pytest.mark.parametrize("reward", [math_answer, exact_match])
@pytest.mark.parametrize("answer", [None, " "])
def test_a_row_without_answer_is_an_error_not_a_zero(reward, answer):
    with pytest.raises(ValueError, match=r"data\.answer"):
        reward("18", answer)


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think>a</think><answer>c</answer>", 1.0),
        ("<think>a</think> <answer>c</answer>", 1.0),
        ("<think>a</think>\n\n<answer>c</answer>", 0.0),
        ("0123456789<think>a</think>\n<answer>c</answer>01234", 0.85),
        ("<think>a</think>\n<answer>c</answer>" + "x" * 200, 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a</think>\n<answer>c", 0.0),
        ("18", 0.0),
    ],
)
def test_think_answer_format(completion, value):
    assert think_answer_format(completion) == pytest.approx(value)


def test_tag_count():
    assert tag_count("<think></think><answer></answer>") == 1.0
    assert tag_count("<think></think><answer></answer></answer>") == 0.75
    assert tag_count("18") == 0.0


def test_boxed_format():
    assert boxed_format("so \\boxed{\\frac{1}{2}}") == 1.0
    assert boxed_format("so \\boxed{\\frac{1}{2}") == 0.0


def test_soft_overlong_falls_in_a_line():
    values = [soft_overlong([0] * n, max_tokens=100, soft_tokens=20) for n in (0, 80, 90, 100, 500)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="completion_ids"):
        soft_overlong(None, max_tokens=100, soft_tokens=20)


def test_built_in_rewards_stay_in_their_range():
    texts = ["", "18", "<think>a</think>\n<answer>18</answer>", "\\boxed{18}", "<answer>" * 50, "x" * 3000]
    for name, builtin in BUILTINS.items():
        if builtin.range is None:
            assert name == "environment", "what an environment gives may be any number"
            continue
        options = {"max_tokens": 100, "soft_tokens": 20} if name == "soft_overlong" else {}
        for text in texts:
            request = {"completion": text, "answer": "18", "completion_ids": list(range(len(text)))}
            value = builtin.function(*(request[part] for part in builtin.reads), **options)
            assert builtin.range[0] <= value <= builtin.range[1], (name, text[:20], value)


@pytest.mark.parametrize(
    "given",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "[B]",
        "**B**",
        "B) sodium chloride",
        "B. H2O (l)",
        "(B) A salt",
        "\\text{B}",
        "option B",
        "The answer B",
    ],
)
def test_a_choice_is_its_label_however_it_is_written(given: str) -> None:
    completion = f"<think>A or C?</think>\n<answer>\n{given}\n</answer>"
    assert choice_answer(completion, "B", where="answer_tag") == 1.0
    assert choice_answer(completion, "(B)") == 1.0
    assert choice_answer(completion, "A") == choice_answer(completion, "C") == 0.0
    assert choice_answer(f"So \\boxed{{{given}}}.", "B") == 1.0


@pytest.mark.parametrize(
    "given",
    [
        "A or B",
        "A, B",
        "A. B",
        "(A) or (B)",
        "A) and B)",
        "",
        "neither",
        "A base is one",
        "sodium chloride",
        "BB",
        "<B>",
    ],
)
def test_two_choices_or_none_are_wrong(given: str) -> None:
    for gold in ("A", "B"):
        assert choice_answer(f"<answer>{given}</answer>", gold) == 0.0


def test_a_choice_in_no_tag_and_words_as_choices() -> None:
    assert choice_answer("Both fit, but the answer is (C).", "C") == 1.0
    assert choice_answer("Both fit, but the answer is (C).", "C", where="answer_tag") == 0.0
    assert choice_answer("<answer>C", "C") == 0.0  # cut off
    assert choice_answer("<answer>True.</answer>", "True") == 1.0
    assert choice_answer("<answer>true</answer>", "False") == 0.0
    assert choice_answer("C", "C") == 1.0
    with pytest.raises(ValueError, match="choice_answer needs the row's answer"):
        choice_answer("C", "")
