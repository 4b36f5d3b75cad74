"""The types of a module are checked again when it changed, or the interface of anything that it imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.check_types import digests, imports_of, unproven

FILES = {
    "pods_cluster/__init__.py": "",
    "pods_cluster/low.py": "X: int = 1\n",
    "pods_cluster/middle/__init__.py": "",
    "pods_cluster/middle/part.py": "from pods_cluster.low import X\n",
    "pods_cluster/middle/beside.py": "def f() -> int:\n    from . import part\n\n    return part.X\n",
    "pods_cluster/high.py": "import pods_cluster.middle.beside as beside\n",
    "pods_cluster/alone.py": "import json\n",
    "benchmarks/run.py": "from pods_cluster import high\n",
    "pyproject.toml": "[tool.pyright]\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("pods_cluster/alone.py", {"alone"}),
        ("pods_cluster/low.py", {"low", "part", "beside", "high", "run"}),
        ("pods_cluster/middle/part.py", {"part", "beside", "high", "run"}),
        ("pods_cluster/high.py", {"high", "run"}),
        ("benchmarks/run.py", {"run"}),
    ],
)
def test_what_imports_a_changed_module_is_checked_with_it(tree: Path, changed: str, again: set[str]) -> None:
    passed = digests(tree)
    assert unproven(digests(tree), passed) == []
    (tree / changed).write_text(FILES[changed] + "NEW = 1\n")
    assert {Path(module).stem for module in unproven(digests(tree), passed)} == again


TYPED = """
def typed(x: int) -> int:
    \"\"\"A sentence.\"\"\"
    y = x
    return y

def untyped(x: int):
    return x

class Thing:
    def __init__(self) -> None:
        self.held = 1
        self.declared: int = 2
        if self.held:
            self.taken = len("a")

    def method(self, other: Thing) -> int:
        self.declared = 3
        other.held = 4
        return 1

    def alone(self) -> None:
        print("a")
        self.flag = True
"""


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        ("    y = x\n", "    y = x + 1\n", False),
        ("        return 1\n", "        return 2\n", False),
        ("A sentence.", "Another one.", False),
        ("class Thing:\n", "class Thing:  # of all\n", False),
        ("typed(x: int) -> int", "typed(x: str) -> int", True),
        ('-> int:\n    "', '-> float:\n    "', True),
        ("    return x\n", "    return str(x)\n", True),  # its type is inferred
        ("self.held = 1", "self.held = 'one'", True),  # so is that of an attribute
        ("self.held = 1", "self.more = 1", True),
        ("declared: int = 2", "declared: str = 2", True),
        ('len("a")', 'str("a")', True),
        ("if self.held", "if not self.held", True),
        ("self.declared = 3", "self.declared = 5", False),
        ("other.held = 4", "other.held = 5", False),
        ('print("a")', 'print("b")', False),
        ("self.flag = True", "self.flag = None", True),
    ],
)
def test_a_change_that_nobody_else_sees_is_checked_alone(tree: Path, before: str, after: str, seen: bool) -> None:
    (tree / "pods_cluster/low.py").write_text(FILES["pods_cluster/low.py"] + TYPED)
    passed = digests(tree)
    assert TYPED.count(before) == 1
    (tree / "pods_cluster/low.py").write_text(FILES["pods_cluster/low.py"] + TYPED.replace(before, after))
    again = {"low", "part", "beside", "high", "run"} if seen else {"low"}
    assert {Path(module).stem for module in unproven(digests(tree), passed)} == again


def test_another_environment_or_a_new_module_is_checked(tree: Path) -> None:
    passed = digests(tree)
    (tree / "pods_cluster/new.py").write_text("")
    assert unproven(digests(tree), passed) == ["pods_cluster/new.py"]
    (tree / "pyproject.toml").write_text("[tool.pyright]\nstrict = true\n")
    assert set(unproven(digests(tree), passed)) == set(digests(tree))


def test_every_import_of_the_package_is_found() -> None:
    root = Path(__file__).parent.parent
    path = root / "pods_cluster/run/parts.py"
    found = imports_of(path, ast.parse(path.read_text()), root, set((root / "pods_cluster").rglob("*.py")))
    assert {root / "pods_cluster/run/step_assembly.py", root / "pods_cluster/config/__init__.py"} <= found
