"""The direction of imports: the command above the run, the dashboard above the command, and neither needed below."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pods_cluster
from tests.dashboard.made import make_run

PACKAGE = Path(pods_cluster.__file__).parent
EXTRA = ("fastapi", "starlette", "uvicorn", "sse_starlette", "prometheus_client")


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """(file relative to the package, module) of every import, also within functions and under TYPE_CHECKING."""
    return tuple(_imports())


def _imports() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((str(path.relative_to(PACKAGE)), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                assert node.module is not None
                for alias in node.names:
                    yield str(path.relative_to(PACKAGE)), f"{node.module}.{alias.name}"


def importers(package: str) -> set[str]:
    """Files outside a folder that import it."""
    prefix = f"pods_cluster.{package}."
    return {file for file, module in imports() if f"{module}.".startswith(prefix) and file.split("/")[0] != package}


def test_nothing_imports_the_dashboard_but_the_command_that_starts_it() -> None:
    assert importers("dashboard") == {"client/cli.py"}
    (source,) = [
        node
        for node in ast.walk(ast.parse((PACKAGE / "client" / "cli.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "dashboard"
    ]
    inside = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    assert any(node.module == "pods_cluster.dashboard.server" for node in inside), "imported when it is called"


def test_only_the_doors_import_the_command() -> None:
    assert {file.split("/")[0] for file in importers("client")} <= {"dashboard", "api"}


@pytest.mark.parametrize("above", ["client", "dashboard", "run"])
def test_telemetry_imports_nothing_above_it(above: str) -> None:
    assert not [file for file in importers(above) if file.startswith("telemetry/")]


WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRA!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv[0] = "pods"
from pods_cluster.client.cli import main
main()
"""


def pods_without_extra(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def test_runs_and_status_work_without_the_packages_of_the_dashboard(tmp_path: Path) -> None:
    make_run(tmp_path, "first", 12)
    listed = pods_without_extra("runs", str(tmp_path))
    assert listed.returncode == 0, listed.stderr
    assert "first" in listed.stdout
    shown = pods_without_extra("status", str(tmp_path / "first"))
    assert shown.returncode == 0, shown.stderr
    assert "12 of" in shown.stdout


def test_a_run_that_cannot_start_is_refused_before_ray_is_imported(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "first", 2)
    code = (
        "import sys; sys.argv = ['pods', 'train', *sys.argv[1:]]\n"
        "from pods_cluster.client.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    command = [sys.executable, "-c", code, str(folder.config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "holds a run already" in result.stderr


def test_the_dashboard_without_its_packages_names_what_to_install(tmp_path: Path) -> None:
    make_run(tmp_path, "first", 2)
    refused = pods_without_extra("dashboard", str(tmp_path))
    assert refused.returncode == 1
    assert "pip install 'pods-cluster[dashboard]'" in refused.stderr
    assert "Traceback" not in refused.stderr
