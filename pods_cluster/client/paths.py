"""Local paths of a configuration made absolute, so that they mean the same in every process of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pods_cluster.config import Config, build_config

JOB_FILES = "working_dir_files"
"""Ray keeps the files that came with a job below a folder of this name."""


def absolute(config: Config) -> Config:
    """The configuration with every path that exists here, and `run.dir`, made absolute."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    for section, field in (
        (tree["model"], "path"),
        (tree["model"], "chat_template"),
        (tree["data"], "path"),
        (tree["data"], "template"),
        (tree["data"].get("eval") or {}, "path"),
        (tree["learner"]["kl"], "reference"),
        *((part, "path") for part in tree["data"]["mix"]),
    ):
        value = section.get(field)
        if isinstance(value, str) and "\n" not in value and "{" not in value and _exists(value):
            section[field] = str(Path(value).expanduser().resolve())
    for reward in tree["reward"]:
        reward["name"] = _absolute_name(reward["name"])
    if (environment := tree["environment"]) is not None:
        environment["name"] = _absolute_name(environment["name"])
        tools = environment["options"].get("tools")
        if isinstance(tools, list):
            environment["options"]["tools"] = [
                _absolute_name(tool) if isinstance(tool, str) else tool for tool in tools
            ]
    tree["run"]["dir"] = str(run_folder(tree["run"]["dir"]))
    return build_config(tree)


def _absolute_name(name: str) -> str:
    """`file.py:function` with an absolute path, where there is such a file."""
    file, separator, function = name.rpartition(":")
    if separator and file.endswith(".py") and _exists(file):
        return f"{Path(file).expanduser().resolve()}:{function}"
    return name


def run_folder(folder: str) -> Path:
    """`run.dir` made absolute. In a Ray job a relative one is taken from the home folder: the job's own folder, in
    which it starts, is deleted after it.
    """
    here = Path.cwd()
    if JOB_FILES in here.parts:
        here = Path.home()
    return (here / Path(folder).expanduser()).resolve()


def _exists(value: str) -> bool:
    try:
        return Path(value).expanduser().exists()
    except OSError:
        return False
