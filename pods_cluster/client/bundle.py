"""The files that travel with a submitted job: the configuration and what it names. No ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pods_cluster.config import Config

MAX_BYTES = 400 * 2**20
"""Ray keeps a job's files in the head node's memory, and takes 500 MiB of them."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".venv*", "*.egg-info")


class BundleError(Exception):
    """Files that a job cannot take with it; the text names them and the fix."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files and folders below `root` that go with a job, relative to it, and their size."""

    root: Path
    paths: tuple[Path, ...]
    nbytes: int

    def copy_to(self, folder: Path) -> None:
        """Lay the files out below `folder` as they lie below `root`."""
        for path in self.paths:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if (self.root / path).is_dir():
                shutil.copytree(self.root / path, target, ignore=LEFT_OUT, dirs_exist_ok=True)
            else:
                shutil.copy2(self.root / path, target)


def bundle_of(config: Config, file: Path, include: Sequence[Path] = (), root: Path | None = None) -> Bundle:
    """The configuration's own file, what it names below `root` (default: here), and what is to be included.

    A path outside of `root` means the same path on the cluster (shared storage, an image). Raises BundleError.
    """
    root = (root or Path.cwd()).resolve()
    found: dict[Path, None] = {}
    for path in (file, *include):
        if not path.resolve().is_relative_to(root):
            raise BundleError(f"{path}: lies outside of {root}; submit from a folder that holds it")
        if not path.exists():
            raise BundleError(f"{path}: there is no such file; correct the path")
        found[path.resolve().relative_to(root)] = None
    for named in _named(config, root):
        path = named if named.is_absolute() else root / named
        if path.exists() and path.resolve().is_relative_to(root) and path.resolve() != root:
            found[path.resolve().relative_to(root)] = None
    paths = [path for path in found if not any(other in path.parents for other in found)]
    sizes = {path: _size(root / path) for path in paths}
    if sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise BundleError(
            f"{largest}: takes {sizes[largest] / 2**20:,.0f} MiB, a job's files at most {MAX_BYTES / 2**20:,.0f} MiB; "
            f"put it where all nodes see it and name it by its absolute path, or by its name on the hub"
        )
    return Bundle(root, tuple(sorted(paths)), sum(sizes.values()))


def _named(config: Config, root: Path) -> Iterator[Path]:
    """Paths that the configuration may name, whether they exist or not."""
    texts = [
        config.model.path,
        config.model.chat_template,
        config.data.path,
        config.data.template,
        config.data.eval.path if config.data.eval is not None else None,
        config.learner.kl.reference,
        *(part.path for part in config.data.mix),
    ]
    for text in texts:
        if text and "\n" not in text and "{" not in text:
            yield Path(text).expanduser()
    environment = config.environment
    tools = environment.options.get("tools", ()) if environment is not None else ()
    names = [
        config.selector.rule,
        *(reward.name for reward in config.reward),
        *(tools if isinstance(tools, list) else ()),
    ]
    if environment is not None:
        names.append(environment.name)
    for name in filter(lambda name: isinstance(name, str), names):
        source, separator, _ = name.rpartition(":")
        if separator and source.endswith(".py"):
            yield Path(source).expanduser()
        elif separator:
            yield from _modules(source, root)


def _modules(module: str, root: Path) -> Iterator[Path]:
    """The file or the whole package that an import of `module` from `root` starts with."""
    first = module.split(".", 1)[0]
    if (root / f"{first}.py").is_file():
        yield Path(f"{first}.py")
    elif (root / first).is_dir() and any((root / first).glob("*.py")):
        yield Path(first)


def _size(path: Path) -> int:
    files: Iterable[Path] = [path] if path.is_file() else (found for found in path.rglob("*") if found.is_file())
    return sum(file.stat().st_size for file in files)
