"""The package has no import circles, imports inside functions counted too."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pods_cluster
from tests.docs.pages import parsed

PACKAGE = Path(pods_cluster.__file__).parent
Graph = dict[str, set[str]]


def modules(package: Path) -> dict[str, Path]:
    """Files of a package by module name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements below a node, wherever they stand; those that only a type checker reads are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports(other)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from imports(child)


def import_graph(package: Path) -> Graph:
    """Modules of the package that each of its modules imports."""
    files = modules(package)
    graph: Graph = {}
    for module, path in files.items():
        needed = set()
        home = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for statement in imports(parsed(path)):
            if isinstance(statement, ast.Import):
                needed.update(alias.name for alias in statement.names)
                continue
            base = home.split(".")[: len(home.split(".")) + 1 - statement.level] if statement.level else []
            source = ".".join([*base, *([statement.module] if statement.module else [])])
            # `from a.b import c` needs the module a.b.c if there is one, else a.b.
            names = {f"{source}.{alias.name}" for alias in statement.names}
            needed |= names & files.keys()
            if names - files.keys():
                needed.add(source)
        graph[module] = (needed & files.keys()) - {module}
    return graph


def circle_in(graph: Graph) -> list[str]:
    """Modules of one circle, each of which imports the next; [] if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]  # graphlib names the imported module first
    return []


def test_no_module_imports_itself_by_way_of_others():
    graph = import_graph(PACKAGE)
    assert "pods_cluster.weights.gloo" in graph["pods_cluster.weights.transport_factory"], "imports in functions count"
    circle = circle_in(graph)
    assert not circle, f"import circle: {' -> '.join(circle)}; move what both need into a module below them"


def made_package(folder: Path, statement: str) -> Path:
    """A package whose module `b` imports `a`, and whose `a` holds the statement."""
    package = folder / "made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(statement)
    (package / "b.py").write_text("import made.a")
    return package


@pytest.mark.parametrize(
    "statement",
    [
        "import made.b",
        "from made import b",
        "from made.b import thing",
        "from . import b",
        "def f():\n    from .b import thing",
    ],
)
def test_every_kind_of_import_closes_a_circle(tmp_path: Path, statement: str):
    assert set(circle_in(import_graph(made_package(tmp_path, statement)))) == {"made.a", "made.b"}


def test_an_import_for_the_type_checker_alone_closes_none(tmp_path: Path):
    statement = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import made.b"
    assert circle_in(import_graph(made_package(tmp_path, statement))) == []
