"""vLLM's inner interfaces are reached through one module, `compat`, and its table of names holds."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pods_cluster
from pods_cluster.generation.engines.vllm import compat

PACKAGE = Path(pods_cluster.__file__).parent
COMPAT = PACKAGE / "generation" / "engines" / "vllm" / "compat.py"


def inner_imports(source: str) -> Iterator[str]:
    """Places of a module's source that import from inside vLLM, or import vLLM and reach in, or name a module of it."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__", "find_spec"):
                names = [str(node.args[0].value)]
        for name in names:
            if name == "vllm" or name.startswith("vllm."):
                yield f"line {node.lineno}: {name}"


def test_only_compat_imports_from_vllm() -> None:
    found = {
        str(path.relative_to(PACKAGE)): places
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != COMPAT and (places := list(inner_imports(path.read_text())))
    }
    assert found == {}, "take these names from pods_cluster.generation.engines.vllm.compat"


@pytest.mark.parametrize(
    "line",
    [
        "import vllm",
        "import vllm.config as config",
        "from vllm.v1.request import Request",
        "def f():\n    from vllm import LLM",
        "import importlib\nimportlib.import_module('vllm.config')",
    ],
)
def test_the_rule_is_seen_where_it_is_broken(line: str) -> None:
    assert list(inner_imports(line))
    assert not list(inner_imports("from pods_cluster.generation.engines.vllm import compat"))


def test_a_type_checker_reads_the_same_names_as_run() -> None:
    [block] = [
        node
        for node in ast.parse(COMPAT.read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    read: dict[str, set[str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names)
        read.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    assert read == {module: set(names) for module, names in compat.NAMES.items()}


def test_it_is_imported_without_vllm_or_torch() -> None:
    """The learner's ranks and an engine that has not set its environment yet import it."""
    code = (
        "import sys; from pods_cluster.generation.engines.vllm import compat\n"
        "assert not {'vllm', 'torch', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
        "try: compat.nothing\nexcept AttributeError: pass\nelse: raise SystemExit('an unknown name was found')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=PACKAGE.parent)


def test_a_name_that_a_release_lacks_is_an_import_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "another_vllm.py").write_text("__version__ = '9.9'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(compat._MODULE_OF, "Scheduler", "another_vllm")
    monkeypatch.setattr(compat, "release", lambda: "9.9")
    with pytest.raises(ImportError, match=r"vLLM 9\.9 has no Scheduler in another_vllm"):
        compat.lookup("Scheduler")


@pytest.mark.vllm
def test_the_installed_release_has_every_name() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    for module, names in compat.NAMES.items():
        if module == "vllm.distributed.weight_transfer.nccl_engine":
            continue  # imports NCCL's bindings, which a CPU build may lack
        for name in names:
            assert compat.lookup(name) is getattr(importlib.import_module(module), name)
            assert getattr(compat, name) is compat.lookup(name)
