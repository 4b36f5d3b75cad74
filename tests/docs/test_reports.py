"""Tests that docs/reliability.md names are there, each in the file that its row links to."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import ALL, ROOT

PAGE = next(page for page in ALL if page.path == Path("docs/reliability.md"))
NAMED = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)\): `(test_\w+)`")


def test_tests_that_are_named_are_there() -> None:
    named = NAMED.findall(PAGE.text)
    assert len(named) > 40
    missing = [
        f"{file}: {test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []
