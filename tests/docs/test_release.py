"""The version, the changelog and the package's metadata say the same."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import pods_cluster

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_changelog_names_this_version_and_its_day() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles[0] == "Unreleased", "changes that come next stand above the versions"
    version, separator, day = titles[1].partition(" - ")
    assert separator, f"{titles[1]!r}: a version's title is '0.1.0 - 2026-11-29'"
    assert version == pods_cluster.__version__
    days = [date.fromisoformat(title.partition(" - ")[2]) for title in titles[1:]]
    assert days == sorted(days, reverse=True)
    assert day == days[0].isoformat()


def test_the_classifiers_are_the_pythons_that_are_allowed() -> None:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # pyright: ignore
    prefix = "Programming Language :: Python :: 3."
    named = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert named == [str(minor) for minor in range(int(low), int(high))]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "pods_cluster" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert "py.typed" in tool["setuptools"]["package-data"]["pods_cluster"]
