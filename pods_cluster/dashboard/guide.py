"""The troubleshooting page of the documentation as the dashboard serves it, so that findings can link to their paragraph."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from markdown_it import MarkdownIt
from markdown_it.token import Token

PATH = "/docs/troubleshooting"
_FILE = "troubleshooting.md"
"""A link to the page under docs/, which a built package holds as a file."""


@cache
def page() -> str:
    """The page as HTML."""
    files = resources.files("pods_cluster.dashboard")
    text = (files / _FILE).read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", anchor(tokens[at + 1].content))
        elif token.type == "inline":
            token.children = list(_own_links(token.children or []))
    frame = (files / "static" / "guide.html").read_text(encoding="utf-8")
    return frame.replace("GUIDE_BODY", markdown.renderer.render(tokens, markdown.options, {}))


def anchor(title: str) -> str:
    """The id of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _own_links(tokens: list[Token]) -> list[Token]:
    """Tokens without links to other pages of the documentation, which are not served: their texts stay."""
    kept: list[Token] = []
    inside = False
    for token in tokens:
        if token.type == "link_open":
            inside = str(token.attrGet("href") or "").startswith(("#", "https://"))
        if token.type in ("link_open", "link_close") and not inside:
            continue
        kept.append(token)
    return kept
