"""Templates by name, as text and from a file; braces are the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods_cluster.data import DataError
from pods_cluster.data.prompt_template import TEMPLATES, fill_template, resolve_template


def test_named_templates() -> None:
    assert fill_template(resolve_template("none"), "2 + 2?") == "2 + 2?"
    boxed = fill_template(resolve_template("boxed"), "2 + 2?")
    assert boxed.startswith("2 + 2?")
    assert "\\boxed{}" in boxed
    thinking = fill_template(resolve_template("think_answer"), "2 + 2?")
    assert thinking.endswith("2 + 2?")
    assert all(tag in thinking for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_prompts_own_braces_stay(name: str) -> None:
    prompt = "Write {prompt} and {0} and {{x}} and \\frac{1}{2} {"
    assert prompt in fill_template(resolve_template(name), prompt)


def test_a_text_of_ones_own() -> None:
    text = resolve_template('Return {"answer": …} as JSON, {x}.\n{prompt}\n%s {')
    assert fill_template(text, "Q") == 'Return {"answer": …} as JSON, {x}.\nQ\n%s {'


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.txt"
    path.write_text("Q: {prompt}\nA:\n", encoding="utf-8")
    assert resolve_template(str(path)) == "Q: {prompt}\nA:"


def test_what_is_not_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.template: 'think_anser' is neither .*did you mean 'think_answer'"):
        resolve_template("think_anser")
    path = tmp_path / "template.txt"
    path.write_text("no place", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.template: the file .* has no \{prompt\}; add it"):
        resolve_template(str(path))
    path.write_bytes(b"\xff{prompt}")
    with pytest.raises(DataError, match=r"data\.template: .*cannot be read as UTF-8"):
        resolve_template(str(path))
