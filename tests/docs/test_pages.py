"""What the pages name is there: links, files, metrics, fields of a configuration, commands and their options.

A rename that forgets the documentation fails here.
"""

from __future__ import annotations

import re
import shlex
import typing
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from pods_cluster.client.cli import app
from pods_cluster.config import Config, build_config
from pods_cluster.config.foreign_names import field_of
from pods_cluster.telemetry.catalog import registry
from tests.docs.pages import ALL, ROOT, Page

each_page = pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.path))

FOLDERS = "pods_cluster|tests|benchmarks|configs|docs|deploy|docker|requirements"
_PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*[\w/*])")
SECTIONS = "|".join(name for name in Config.model_fields if name != "staleness")
_FIELD = re.compile(rf"(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
_METRIC = re.compile(r"[a-z_]+(?:/[A-Za-z_<>]+)+")
METRIC_ROOTS = {metric.name.partition("/")[0] for metric in registry if "/" in metric.name}
ENDINGS = (".yaml", ".yml", ".json", ".jsonl", ".md", ".py", ".png", ".svg", ".toml", ".txt", ".log")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@each_page
def test_links_lead_somewhere(page: Page) -> None:
    known = {other.path: other for other in ALL}
    for target in page.links:
        name, _, fragment = target.partition("#")
        path = (ROOT / page.path.parent / name).resolve() if name else ROOT / page.path
        assert path.exists(), f"{page.path}: the link {target} leads to no file"
        if fragment and path.suffix == ".md":
            there = known[path.relative_to(ROOT)].anchors
            assert fragment in there, f"{page.path}: {target}: no title of that page is called so"


@each_page
def test_files_that_are_named_exist(page: Page) -> None:
    for name in _PATH.findall(page.text):
        if _is_metric(name) or name in EXAMPLES:
            continue
        found = list(ROOT.glob(name)) if "*" in name else [ROOT / name]
        assert found, f"{page.path}: no file is called {name}"
        assert all(path.exists() for path in found), f"{page.path}: there is no {name}"


EXAMPLES: set[str] = set()
"""Paths that a page uses as an example and that need not be there."""


@each_page
def test_modules_in_backticks_exist(page: Page) -> None:
    """Named from the repository or from the package, as in `selection/rules.py`."""
    for code in page.code:
        if re.fullmatch(r"[a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py", code):
            assert (ROOT / code).is_file() or (ROOT / "pods_cluster" / code).is_file(), f"{page.path}: no module {code}"


@each_page
def test_metrics_in_backticks_are_in_the_catalogue(page: Page) -> None:
    for code in page.code:
        if _METRIC.fullmatch(code) and code.partition("/")[0] in METRIC_ROOTS and not (ROOT / code).exists():
            assert _is_metric(code), f"{page.path}: `{code}` is no metric of telemetry/catalog.py"


def _is_metric(name: str) -> bool:
    return registry.find(name) is not None or any(metric.name == name for metric in registry)


@each_page
def test_fields_that_are_named_are_in_the_configuration(page: Page) -> None:
    """In backticks, as in `learner.workers` and `staleness: 1`, and in commands, as in learner.workers=4."""
    named = [code for text in page.code for code in _FIELD.findall(text) if text.startswith(code)]
    commands = "\n".join(text for language, text in page.blocks if language != "yaml")
    named += [found[1] for found in re.finditer(rf"(?<![\w./-])({_FIELD.pattern})=", commands)]
    for name in named:
        if page.path == MIGRATION and (name in VERL or field_of(name) is not None):
            continue  # verl's sections have names of ours
        if not name.endswith(ENDINGS):
            assert _is_field(name.split(".")), f"{page.path}: {name} is no field of the configuration"


MIGRATION = Path("docs/migrate.md")
VERL = {
    "data.train_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.sampler.class_path",
}


def _is_field(parts: list[str], section: Any = Config) -> bool:
    if not parts:
        return True
    if section is Any or typing.get_origin(section) is dict:
        return True
    if isinstance(section, type) and issubclass(section, BaseModel):
        field = section.model_fields.get(parts[0])
        return field is not None and _is_field(parts[1:], field.annotation)
    inner = [part for part in typing.get_args(section) if part is not type(None)]
    if typing.get_origin(section) in (list, tuple):
        parts = parts[1:] if parts[0].isdigit() else parts
    return any(_is_field(parts, part) for part in inner)


@each_page
def test_configurations_in_yaml_blocks_are_valid(page: Page) -> None:
    """Parts of one: their fields. Whole ones: everything that can be checked without model and data."""
    for language, text in page.blocks:
        if language not in ("yaml", "yml"):
            continue
        tree = yaml.safe_load(text)
        if not isinstance(tree, dict) or not set(tree) <= set(Config.model_fields):
            continue
        if {"model", "data", "reward", "run"} <= set(tree):
            build_config(tree)
        for name in _leaves(tree):
            assert _is_field(name), f"{page.path}: {'.'.join(name)} is no field of the configuration"


def _leaves(tree: Any, above: tuple[str, ...] = ()) -> list[list[str]]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*above, str(key)))]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for place, item in enumerate(tree) for leaf in _leaves(item, (*above, str(place)))]
    return [list(above)]


@each_page
def test_commands_exist_with_their_options(page: Page) -> None:
    for line in _command_lines(page):
        words = _words(line)
        for place, word in enumerate(words[:-1]):
            if word != "pods" or (place and words[place - 1] not in ("&", "&&", ";", "|", "--", "-lc")):
                continue
            rest = words[place + 1 :]
            end = next((i for i, other in enumerate(rest) if other in ("&", "&&", ";", "|")), len(rest))
            _check_command(page, rest[:end])


def _check_command(page: Page, words: list[str]) -> None:
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None:
        return
    assert name in COMMANDS, f"{page.path}: `pods {name}` is no command"
    known = {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[: words.index("--") if "--" in words else None]:
        if word.startswith("--") and word not in ("--", "--help", "--version"):
            assert word.partition("=")[0] in known, f"{page.path}: `pods {name}` has no option {word}"


def _command_lines(page: Page) -> list[str]:
    texts = [text for language, text in page.blocks if language in ("bash", "sh", "")]
    joined = "\n".join(texts).replace("\\\n", " ")
    return [*joined.splitlines(), *(code for code in page.code if code.startswith("pods "))]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:  # an apostrophe in a line of output
        return []


@each_page
def test_modules_that_are_run_exist(page: Page) -> None:
    for name in re.findall(r"python3? -m ((?:benchmarks|pods_cluster)[\w.]*)", page.text):
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.path}: no module {name}"


def test_every_page_of_docs_is_in_its_index() -> None:
    index = next(page for page in ALL if page.path == Path("docs/README.md"))
    linked = {(ROOT / "docs" / target.partition("#")[0]).resolve() for target in index.links}
    missing = [page.path for page in ALL if page.path.parent == Path("docs") and (ROOT / page.path) not in linked]
    assert [path for path in missing if path != index.path] == []


def test_every_image_is_shown_on_a_page() -> None:
    shown = {(ROOT / page.path.parent / target).resolve() for page in ALL for target in page.links}
    pictures = [*ROOT.glob("docs/images/*"), *ROOT.glob("benchmarks/results/*.png")]
    assert [str(path.relative_to(ROOT)) for path in pictures if path not in shown] == []


def test_the_readme_is_short() -> None:
    readme = next(page for page in ALL if page.path == Path("README.md"))
    assert len(readme.text.splitlines()) < 150
