"""The repository's Markdown pages, and what stands in them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
SKIPPED = {"runs", "build", "dist", "node_modules"}

_FENCE = re.compile(r"^( *)(```+)([a-z]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_TITLE = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_HTML_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\">")


@dataclass(frozen=True)
class Page:
    """One Markdown file. `path` is relative to the repository."""

    path: Path

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Fenced blocks: (language, text)."""
        return [(found[3], found[4]) for found in _FENCE.finditer(self.text)]

    @cached_property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and images that lie in the repository."""
        plain = _CODE.sub("", self.prose)
        targets = [unquote(target.strip("<>")) for target in _LINK.findall(plain)]
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @cached_property
    def code(self) -> list[str]:
        """Inline code, as it stands between backticks."""
        return _CODE.findall(self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors that GitHub gives the titles, and those written as HTML."""
        seen: Counter[str] = Counter()
        anchors = set(_HTML_ANCHOR.findall(self.text))
        for title in _TITLE.findall(self.prose):
            name = anchor(title)
            anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
        return anchors


def anchor(title: str) -> str:
    """GitHub's anchor of a title: lower case, punctuation gone, spaces to hyphens."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def pages() -> Iterator[Page]:
    """Every page of the repository."""
    for path in sorted(path for path in ROOT.rglob("*.md") if not path.is_symlink()):
        relative = path.relative_to(ROOT)
        if not any(part.startswith(".") or part in SKIPPED for part in relative.parts):
            yield Page(relative)


ALL = list(pages())


@cache
def package() -> dict[Path, ast.Module]:
    """The modules of the package, parsed, by their path in the repository."""
    return {path.relative_to(ROOT): parsed(path) for path in sorted((ROOT / "pods_cluster").rglob("*.py"))}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))
