"""Checks the types of the modules that changed since they last passed, and of all that import them, directly or not.

`python -m tests.check_types` is what `make check` runs: pyright keeps nothing between two runs, and one over everything takes
most of a minute. A module's verdict depends on its text, on what it imports and on the environment; `.cache/types.json` holds
the digest of these for each module that passed. `make lint`, and so .ci/run, checks everything.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDERS = ("pods_cluster", "benchmarks")
ENVIRONMENT = ("pyproject.toml", "requirements/*.txt", "typings/**/*.pyi")
PASSED = Path(".cache/types.json")


def imports_of(path: Path, root: Path, modules: Iterable[Path]) -> set[Path]:
    """The files among `modules` that this one imports."""
    known = set(modules)
    package = path.relative_to(root).parent.parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def digests(root: Path) -> dict[str, str]:
    """A digest for each module: of its text, of the text of all that it imports, directly or not, and of the environment."""
    environment = hashlib.sha256(sys.version.encode())
    for pattern in ENVIRONMENT:
        for path in sorted(root.glob(pattern)):
            environment.update(path.read_bytes())
    modules = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    texts = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in modules}
    imported = {path: imports_of(path, root, modules) for path in modules}
    found: dict[str, str] = {}
    for path in modules:
        seen, ahead = {path}, [path]
        while ahead:
            new = imported[ahead.pop()] - seen
            seen |= new
            ahead += new
        whole = environment.copy()
        for each in sorted(seen):
            whole.update(f"{each.relative_to(root)} {texts[each]}\n".encode())
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
