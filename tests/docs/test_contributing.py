"""CONTRIBUTING's table of rooms is the package as it is, and its exercise has answers that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ALL, ROOT, package

PAGE = next(page for page in ALL if page.path == Path("CONTRIBUTING.md"))
PACKAGE = ROOT / "pods_cluster"


def test_every_room_has_its_row() -> None:
    rooms = [f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    modules = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert sorted(_rows()) == sorted([*rooms, *modules])


def test_the_modules_that_import_ray_are_named() -> None:
    wrong = {}
    for room, cell in _rows().items():
        found = _importers_of_ray(room)
        right = ", ".join(f"`{name}`" for name in found) or "none"
        if cell != right:
            wrong[room] = f"{cell} -> {right}"
    assert wrong == {}, "the last column of CONTRIBUTING.md is not what the modules import"


def test_config_imports_nothing_heavy() -> None:
    heavy = {"torch", "ray", "vllm", "transformers", "deepspeed", "datasets"}
    for path in package():
        if path.parts[1] == "config":
            assert not {name for module in _reached(path) for name in _foreign(module)} & heavy, path


def test_deepspeed_and_vllm_are_imported_in_their_rooms_only() -> None:
    """Anywhere in a module, also in its functions."""
    rooms = {"deepspeed": PACKAGE / "learning", "vllm": PACKAGE / "generation" / "engines" / "vllm"}
    for path, tree in package().items():
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for name in {name.split(".")[0] for node in imports for name in _names(node)} & rooms.keys():
            assert (ROOT / path).is_relative_to(rooms[name]), f"{path} imports {name}"


def test_the_exercise_has_ten_questions_with_answers() -> None:
    section = PAGE.text.split("\n## Find it: ten questions\n")[1].split("\n## ")[0]
    questions = re.findall(r"^(\d+)\. .+\?", section, re.MULTILINE)
    answers = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| `(\w+)` \|$", section, re.MULTILINE)
    assert questions == [number for number, _, _ in answers] == [str(number) for number in range(1, 11)]
    for number, name, symbol in answers:
        path = Path("pods_cluster") / name
        assert path in package(), f"answer {number}: there is no {path}"
        defined = set(_defined(package()[path]))
        assert symbol in defined, f"answer {number}: {name} has no {symbol}"


def _rows() -> dict[str, str]:
    """Room -> last cell."""
    table = PAGE.text.split("| imports Ray |\n")[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]
    return {row[0].strip("` "): row[-1].strip() for row in cells}


def _importers_of_ray(room: str) -> list[str]:
    folder = Path("pods_cluster") / room.rstrip("/")
    if room.endswith("/"):
        inside = sorted(path for path in package() if path.is_relative_to(folder))
    else:
        inside = [folder]
    return [
        str(path.relative_to(folder)) if room.endswith("/") else path.name
        for path in inside
        if any("ray" in _foreign(module) for module in _reached(path))
    ]


_imports: dict[Path, tuple[set[Path], set[str]]] = {}


def _reached(start: Path) -> set[Path]:
    """Modules of the package that importing `start` imports too."""
    reached: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        waiting += _read(path)[0]
    return reached


def _foreign(path: Path) -> set[str]:
    """Top-level names of what a module imports from outside the package."""
    return _read(path)[1]


def _read(path: Path) -> tuple[set[Path], set[str]]:
    if path not in _imports:
        own: set[Path] = {parent / "__init__.py" for parent in path.parents} & package().keys() - {path}
        foreign: set[str] = set()
        for node in _at_import(package()[path].body):
            for name in _names(node):
                if name.split(".")[0] == "pods_cluster":
                    own |= _files(name)
                else:
                    foreign.add(name.split(".")[0])
        _imports[path] = own, foreign
    return _imports[path]


def _at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when the module is imported: not those in functions or for types alone."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _at_import(node.body)
            yield from _at_import(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                yield from _at_import(part)
        elif isinstance(node, (ast.ClassDef, ast.With)):
            yield from _at_import(node.body)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.module is not None, "imports are absolute"
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def _files(name: str) -> set[Path]:
    """The files of a dotted name and of the packages above it."""
    parts = name.split(".")
    paths = [Path(*parts[: end + 1]) for end in range(len(parts))]
    candidates = {path.with_suffix(".py") for path in paths} | {path / "__init__.py" for path in paths}
    return candidates & package().keys()


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
