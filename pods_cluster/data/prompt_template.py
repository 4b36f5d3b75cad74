"""Prompt templates: words around a row's prompt that ask for an answer in a form that a reward can check."""

from __future__ import annotations

from pathlib import Path

from pods_cluster.data.errors import DataError, closest

PLACE = "{prompt}"

TEMPLATES = {
    "none": PLACE,
    "think_answer": (
        "Solve the problem below. First reason step by step inside <think> and </think>, then give the final answer, "
        "and nothing else, inside <answer> and </answer>, in this form:\n"
        "<think>\nyour reasoning\n</think>\n<answer>\nyour final answer\n</answer>\n\n"
        "Problem: {prompt}"
    ),
    "boxed": "{prompt}\n\nReason step by step, and put your final answer within \\boxed{}.",
}


def resolve_template(value: str) -> str:
    """Return the text of a template given by name, as a text with `{prompt}`, or as a path to one. Raises DataError."""
    if value in TEMPLATES:
        return TEMPLATES[value]
    if PLACE in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.template: {value!r} is neither a template{closest(value, TEMPLATES)}, a text with {PLACE}, nor a "
            f"file; known: {', '.join(TEMPLATES)}"
        )
    text = read_text(path, "data.template").removesuffix("\n")
    if PLACE not in text:
        raise DataError(f"data.template: the file {value!r} has no {PLACE}; add it where the row's prompt goes")
    return text


def fill_template(text: str, prompt: str) -> str:
    """Put `prompt` in its place. Every other brace stays as it is: `\\boxed{}` needs no escape."""
    return text.replace(PLACE, prompt)


def read_text(path: Path, field: str) -> str:
    """Read a UTF-8 file that `field` points to. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{field}: {str(path)!r} cannot be read as UTF-8 text ({error}); correct the path") from None
