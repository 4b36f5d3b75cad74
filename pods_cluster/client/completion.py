"""Completions of a shell at the Tab key: fields of the configuration, and runs of the folder `runs`."""

from __future__ import annotations

from pathlib import Path

from pods_cluster.config.problems import field_paths


def override_names(incomplete: str) -> list[str]:
    """`key=` of each field that begins so; sections alone while there is no dot, as there are many fields."""
    if "=" in incomplete:
        return []
    paths = field_paths()
    sections = {path.rpartition(".")[0] for path in paths} - {""}
    depth = incomplete.count(".")
    here = [path for path in paths if path.startswith(incomplete) and path.count(".") == depth]
    here = [path for path in here if path != "reward"]
    if len(here) == 1 and here[0] in sections:  # a single answer gets a space behind it, which a section must not have
        return override_names(here[0] + ".")
    return [f"{path}." if path in sections else f"{path}=" for path in here]


def run_names(incomplete: str) -> list[str]:
    """Names of the runs in the folder `runs` that begin so."""
    return sorted(path.parent.name for path in Path("runs").glob(f"{_plain(incomplete)}*/config.yaml"))


def _plain(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)
