"""The wheel as pip gets it: what it holds, what it asks for, and a long description without dead links. It is built here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import pods_cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = tracked()
    with tarfile.open(source / "files.tar", "w") as archive:
        for name in files:
            archive.add(ROOT / name, name)
    with tarfile.open(source / "files.tar") as archive:
        archive.extractall(source, filter="fully_trusted")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def tracked() -> list[str]:
    """The files that a package is built from."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git here")
    wanted = (
        "pods_cluster/",
        "configs/",
        "docs/troubleshooting.md",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    )
    return [name for name in done.stdout.splitlines() if name.startswith(wanted) and (ROOT / name).exists()]


def metadata(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(wheel.read(name).decode())
    return {key: message.get_all(key, []) for key in set(message.keys())} | {"body": [str(message.get_payload())]}


def test_it_holds_every_file_of_the_package_and_the_shipped_configurations(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    assert [name for name in tracked() if name.startswith("pods_cluster/") and name not in held] == []
    data = f"pods_cluster-{pods_cluster.__version__}.data/data/share/pods-cluster/"
    configurations = [name for name in tracked() if name.startswith("configs/") and name.endswith(".yaml")]
    assert len(configurations) > 20
    assert [name for name in configurations if data + name not in held] == []
    page = wheel.read("pods_cluster/dashboard/troubleshooting.md")
    assert page == (ROOT / "docs/troubleshooting.md").read_bytes(), "in the repository it is a link"
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/", "examples/"))]
    (entries,) = (name for name in held if name.endswith("entry_points.txt"))
    assert "pods = pods_cluster.client.cli:main" in wheel.read(entries).decode()


def test_what_it_asks_for_is_what_the_tests_ran_with(wheel: zipfile.ZipFile) -> None:
    asked = [Requirement(text) for text in metadata(wheel)["Requires-Dist"]]
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    versions = {re.sub("[-_.]+", "-", name).lower(): Version(version) for name, version in locked.items()}
    for each in asked:
        if each.marker is None or 'extra == "cpu"' in str(each.marker):
            assert each.specifier.contains(versions[each.name]), f"{each}: the lock has {versions[each.name]}"
    (torch,) = (each for each in asked if 'extra == "cpu"' in str(each.marker))
    assert str(torch.specifier) == f"=={versions['torch']}"
    extras = {"cpu", "gpu", "dashboard", "tensorboard", "wandb", "mlflow", "trackio", "dev"}
    assert set(metadata(wheel)["Provides-Extra"]) == extras


def test_the_long_description_has_no_link_that_leads_nowhere(wheel: zipfile.ZipFile) -> None:
    text = metadata(wheel)["body"][0]
    assert "# PODS cluster" in text
    assert "](https://arxiv.org/abs/2504.13818)" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if not re.match("https?://|#", target)] == []


def test_with_a_repository_links_and_images_are_absolute() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = setup_file().long_description(readme, "https://example.org/pods/", "1.2.3")
    for target in re.findall(r"\]\(([^)\s]+)\)", readme):
        if re.match("https?://|#", target):
            assert f"]({target})" in made
        else:
            assert f"]({target})" not in made
            kind = "raw" if target.endswith((".svg", ".png")) else "blob"
            assert f"](https://example.org/pods/{kind}/v1.2.3/{target})" in made
    assert len(made.split()) == len(readme.split()), "nothing else is changed"


def setup_file() -> ModuleType:
    found = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
