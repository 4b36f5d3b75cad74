"""The long description of the package: README.md with links that work on a package index.

`Repository` in `[project.urls]` of pyproject.toml is the one place that says where the files are. With it, links and images point
there, at the tag of this version. Without it a link that has no address anywhere would be dead: its text stays, and images go.
All else is in pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")


def long_description(readme: str, repository: str | None, version: str) -> str:
    """README.md's text with its links to files of the repository made absolute, or taken out where it has no address."""

    def absolute(found: re.Match[str]) -> str:
        target = found["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return found[0]
        if repository is None:
            return "" if found["image"] else found["text"]
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({repository.rstrip('/')}/{kind}/v{version}/{target})"

    return _LINK.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "pods_cluster/__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    setup(
        long_description=long_description(
            (ROOT / "README.md").read_text(encoding="utf-8"), project["urls"].get("Repository"), version[1]
        ),
        long_description_content_type="text/markdown",
    )
