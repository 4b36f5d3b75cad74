"""The troubleshooting page has everything that a run can say: health rules, kinds of events and failures, errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pods_cluster.scoring.score import FailureKind
from pods_cluster.telemetry.health_rules import RULES
from tests.docs.pages import ALL, package

PAGE = next(page for page in ALL if page.path == Path("docs/troubleshooting.md"))
TOLD_BY = {"event": 0, "notice": 0, "_notice": 0, "warning": 0, "_tell_once": 1}
"""Calls that record an event, and the place of its kind among their arguments."""


def test_every_health_rule_has_its_paragraph() -> None:
    missing = [rule.name for rule in RULES if rule.name not in PAGE.anchors]
    assert missing == [], "docs/troubleshooting.md needs a title of this name under Health"


def test_every_kind_of_event_is_explained_and_none_that_is_not_there() -> None:
    emitted = {kind for tree in package().values() for kind, _ in _told(tree)}
    assert {"failed", "worker_failed", "telemetry"} <= emitted
    assert _first_column("Events") == emitted


def test_events_have_the_levels_that_the_page_says() -> None:
    levels: dict[str, set[str]] = {}
    for kind, level in (told for tree in package().values() for told in _told(tree)):
        levels.setdefault(kind, set()).add(level)
    shown = {kind: set(cells[1].split(" or ")) for cells in _rows("Events") for kind in _names(cells[0])}
    assert {kind: found for kind, found in levels.items() if "?" not in found and shown[kind] != found} == {}


def test_every_kind_of_failed_reward_is_explained() -> None:
    assert _first_column("Rewards that fail") == {kind.value for kind in FailureKind}


def test_every_error_is_explained_and_none_that_is_not_there() -> None:
    bases = {node.name: [ast.unparse(base) for base in node.bases]
             for tree in package().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}  # fmt: skip

    def is_error(name: str) -> bool:
        return any(base in BUILTIN or is_error(base.rpartition(".")[2]) for base in bases.get(name, ()))

    errors = {name for name in bases if is_error(name) and not name.startswith("_")}
    assert _first_column("Errors") == errors


BUILTIN = {"Exception", "ValueError", "RuntimeError", "TypeError", "OSError", "KeyError", "LookupError", "TimeoutError"}


def _first_column(title: str) -> set[str]:
    return {name for cells in _rows(title) for name in _names(cells[0])}


def _rows(title: str) -> list[list[str]]:
    """Cells of the section's table, of rows that begin with code."""
    section = PAGE.text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines() if row.startswith("| `")]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _told(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Kind and level of every event that a module records; "?" for a level that is computed."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        place = TOLD_BY.get(node.func.attr)
        if place is None or len(node.args) <= place + 1:
            continue
        kind = node.args[place]
        if isinstance(kind, ast.Constant) and isinstance(kind.value, str) and re.fullmatch(r"[a-z_]+", kind.value):
            level = next((keyword.value for keyword in node.keywords if keyword.arg == "level"), None)
            if level is None:
                yield kind.value, "warning" if node.func.attr in ("warning", "_tell_once") else "info"
            else:
                yield kind.value, str(level.value) if isinstance(level, ast.Constant) else "?"
