"""Checks the types of the modules that changed since they last passed, and of those that see the change.

`python -m tests.check_types` is what `make check` runs: pyright keeps nothing between two runs, and one over everything takes
a minute and more. A module's verdict depends on its text, on the interfaces of all that it imports, directly or not, and on
the environment; `.cache/types.json` holds the digest of these for each module that passed. A change inside a function whose
return type is written down is seen by nobody else. `make lint`, and so .ci/run, checks everything.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TypeGuard

FOLDERS = ("pods_cluster", "benchmarks")
ENVIRONMENT = ("pyproject.toml", "requirements/*.txt", "typings/**/*.pyi")
PASSED = Path(".cache/types.json")


def imports_of(path: Path, tree: ast.Module, root: Path, known: Set[Path]) -> set[Path]:
    """The files among `known` that the module of this path imports."""
    package = path.relative_to(root).parent.parts
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    found: set[Path] = set()
    for name in names:
        # not the packages above: what they hold is not seen through the name of a module in them
        place = root.joinpath(*name.split("."))
        found |= {place.with_suffix(".py"), place / "__init__.py"} & known
    return found - {path}


class _Interface(ast.NodeTransformer):
    """Takes out what no other module's types can depend on: docstrings, and bodies of functions that say what they return.

    A body from which the type of an attribute is inferred stays.
    """

    def __init__(self) -> None:
        self._declared: set[str] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self._declared = self._declared, _declared(node)
        self.generic_visit(node)
        self._declared = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if node.returns is not None and (kept := self._inferred_from(node)) is not None:
            node.body = kept
        return self.generic_visit(node)

    def _inferred_from(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt] | None:
        """The statements from which types of attributes are inferred; None where that takes the whole body."""
        first = node.args.args[0].arg if node.args.args else ""
        kept: list[ast.stmt] = []
        within = [inner for statement in node.body for inner in ast.walk(statement)]
        if any(isinstance(inner, ast.Global) for inner in within):
            return None
        sets = {id(inner) for inner in within if _is_set(inner, first) and inner.attr not in self._declared}
        for inner in within:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Attribute):
                kept.append(ast.AnnAssign(inner.target, inner.annotation, None, 0))
            elif isinstance(inner, ast.Assign | ast.AugAssign) and isinstance(inner.value, ast.Constant):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                if found := sets & {id(target) for target in targets}:
                    kept.append(inner)
                    sets -= found
        return None if sets else kept


def _is_set(node: ast.AST, owner: str) -> TypeGuard[ast.Attribute]:
    """Whether this is the `owner.name` of an assignment."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    )


def _declared(node: ast.ClassDef) -> set[str]:
    """Attributes of a class whose types are written down in it."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            targets = [inner.target for inner in ast.walk(statement) if isinstance(inner, ast.AnnAssign)]
            names.update(target.attr for target in targets if isinstance(target, ast.Attribute))
    return names


def interface(tree: ast.Module) -> str:
    """What the types of other modules can depend on; the tree is used up."""
    return ast.dump(_Interface().visit(tree))


def digests(root: Path) -> dict[str, str]:
    """A digest of each module's text, of the interfaces of all that it imports, directly or not, and of the environment."""
    environment = hashlib.sha256(sys.version.encode())
    for pattern in ENVIRONMENT:
        for path in sorted(root.glob(pattern)):
            environment.update(path.read_bytes())
    modules = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in modules}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    known = set(modules)
    imported = {path: imports_of(path, tree, root, known) for path, tree in trees.items()}
    interfaces = {path: hashlib.sha256(interface(tree).encode()).hexdigest() for path, tree in trees.items()}
    found: dict[str, str] = {}
    for path in modules:
        seen, ahead = {path}, [path]
        while ahead:
            new = imported[ahead.pop()] - seen
            seen |= new
            ahead += new
        whole = environment.copy()
        whole.update(texts[path].encode())
        for each in sorted(seen - {path}):
            whole.update(f"{each.relative_to(root)} {interfaces[each]}\n".encode())
        found[str(path.relative_to(root))] = whole.hexdigest()
    return found


def unproven(now: Mapping[str, str], passed: Mapping[str, str]) -> list[str]:
    """Modules that have not passed as they are now."""
    return [module for module, digest in now.items() if passed.get(module) != digest]


def main(root: Path = Path()) -> int:
    """Check what has to be checked; the exit code is pyright's."""
    try:
        passed: dict[str, str] = json.loads((root / PASSED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        passed = {}
    now = digests(root.resolve())
    modules = unproven(now, passed)
    print(f"types: {len(modules)} of {len(now)} modules to check", flush=True)
    if not modules:
        return 0
    pyright = Path(sys.executable).with_name("pyright")
    code = subprocess.run([pyright, "--pythonpath", sys.executable, *modules], cwd=root, check=False).returncode
    if code == 0:
        (root / PASSED).parent.mkdir(exist_ok=True)
        (root / PASSED).write_text(json.dumps(now, indent=0), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
