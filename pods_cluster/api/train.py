"""`pods_cluster.train`: a run from a script or a notebook, on this machine or on the Ray cluster of RAY_ADDRESS."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pods_cluster.api.environments import environment_section
from pods_cluster.api.inputs import FOLDER, HeldRows, held_rows
from pods_cluster.api.result import TrainResult
from pods_cluster.api.rewards import RewardLike, reward_entries
from pods_cluster.config import Config, ConfigError, DataConfig, build_config
from pods_cluster.config.load import changed, load_tree

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

StepCallback = Callable[[dict[str, Any]], object]
"""Gets the record of each step: `step`, `elapsed`, and metrics by name. StopIteration from it ends the run."""


def train(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Dataset | DatasetDict | Sequence[Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    reward: RewardLike | Sequence[RewardLike] | None = None,
    *,
    eval_dataset: Dataset | Sequence[Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    callbacks: StepCallback | Sequence[StepCallback] = (),
    resume: bool = False,
    display: Literal["auto", "plain", "off"] = "auto",
    **sections: Any,
) -> TrainResult:
    """Train a model with reinforcement learning, as `pods train` does, and return when the run has ended.

    model: folder or hub name, or a section `model` as in YAML.
    dataset: a `datasets.Dataset`, a list of dicts, a data frame, or the path or hub name of one.
    reward: a function `f(prompts, completions, **columns) -> list of numbers` (TRL) or `f(data_source, solution_str,
        ground_truth, extra_info)` (verl), a name as in YAML, a section `{"name": function, "weight": 0.5}`, or a list of
        these. Functions run in processes of their own, which are killed at `timeout`; closures, lambdas and functions of
        a script or a notebook are copied there with what they hold.
    eval_dataset: held-out rows, with the same columns.
    config: a run's YAML file, or a mapping, to which everything else is added. Keys of mappings may be dotted.
    sections: fields of the configuration: `learner={"learning_rate": 1e-5}`, `staleness=1`, `environment=MyEnvironment` (a
        class, or a section), `**{"generator.workers": 2}`. docs/config.md lists them. Left out, `run.name` is made from model
        and time, and `generator.engine` is vllm where it is installed and there is a GPU or a cluster, else transformers.
    callbacks: called after each step with its record; one that raises StopIteration ends the run as Ctrl-C does. Any
        other error ends it too, and is raised again once the state is saved.
    resume: go on from the newest checkpoint of the run of this name.
    display: a live panel where the output can show one (`auto`), a line a step (`plain`), or nothing (`off`).

    Ctrl-C (in a notebook: interrupt) ends the run after its step with its state saved, and returns; another one ends it at
    once. Raises ConfigError for what cannot be run, with field, value and fix, and what ends a run otherwise with its
    cause: RunError, ClusterError, DataError and others of pods_cluster.
    """
    hooks = [callbacks] if callable(callbacks) else list(callbacks)
    for index, hook in enumerate(hooks):
        if not callable(hook):
            raise ConfigError(f"callbacks: item {index} ({hook!r}) cannot be called; give functions of a step's record")
    if display not in ("auto", "plain", "off"):
        raise ConfigError(f"display: {display!r} is unknown; choose auto, plain or off")
    built = configure(model, dataset, reward, eval_dataset=eval_dataset, config=config, **sections)
    return run(built, hooks, resume=resume, display=display)


def configure(
    model: Any = None,
    dataset: Any = None,
    reward: Any = None,
    *,
    eval_dataset: Any = None,
    config: Any = None,
    reward_defaults: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Config:
    """The configuration of a call of `train`, with the rows that it was given written beside the runs.

    `reward_defaults` are fields of `reward` for functions. Raises ConfigError; nothing is written then.
    """
    tree = (
        load_tree(Path(config), "a run's YAML file")
        if isinstance(config, str | os.PathLike)
        else changed({}, config or {})
    )
    tree = changed(tree, sections)
    if tree.get("environment") is not None:
        tree["environment"] = environment_section(tree["environment"])
    if model is not None:
        tree = changed(tree, {"model": dict(model) if isinstance(model, Mapping) else {"path": _model_path(model)}})
    if reward is not None:
        tree["reward"] = reward_entries(reward, reward_defaults)
    tree = changed(_defaults(tree), tree)
    rows = {}
    for argument, given, key in (("dataset", dataset, "data"), ("eval_dataset", eval_dataset, "data.eval")):
        if given is None:
            continue
        held = held_rows(given, argument)
        tree = changed(tree, {f"{key}.path": os.fspath(given) if held is None else argument})
        if held is not None:
            rows[key] = held
            tree = changed(tree, _layout(held, key, tree))
    checked = build_config(tree, source="train")
    for key, held in rows.items():
        folder = Path(checked.run.dir).expanduser() / FOLDER / checked.run.name
        path = held.write(folder, "eval" if key == "data.eval" else "train")
        tree = changed(tree, {f"{key}.path": str(path.absolute())})
    return build_config(tree, source="train") if rows else checked


def run(
    config: Config,
    callbacks: Sequence[StepCallback] = (),
    *,
    resume: bool = False,
    display: Literal["auto", "plain", "off"] = "auto",
) -> TrainResult:
    """Run a configuration to its end; see `train`."""
    from rich.console import Console

    from pods_cluster.client.paths import run_folder
    from pods_cluster.client.refusals import refuse_start
    from pods_cluster.run.ray_access import use_ray_token

    refuse_start(config, resume=resume)
    use_ray_token()
    from pods_cluster.client.driver import train as drive

    summary = drive(
        config,
        resume=resume,
        console=Console(quiet=display == "off"),
        live=None if display == "auto" else False,
        on_step=functools.partial(_call_all, callbacks) if callbacks else None,
    )
    if summary.trained_nothing:
        warnings.warn(
            f"{config.run.name}: not one step had rollouts to train on, so the model is the one that it began with; the "
            f"run's events say why",
            RuntimeWarning,
            stacklevel=3,
        )
    folder = run_folder(config.run.dir) / config.run.name
    return TrainResult(config.run.name, folder, summary.status, summary.steps, summary)


def default_engine() -> str:
    """vllm where it is installed and there is a GPU, or a cluster that may have some; else transformers."""
    return "vllm" if has_gpu() and is_installed("vllm") else "transformers"


def is_installed(package: str) -> bool:
    """Whether a package is there; nothing is imported."""
    return importlib.util.find_spec(package) is not None


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA card, or RAY_ADDRESS names a cluster that may have some."""
    return shutil.which("nvidia-smi") is not None or bool(os.environ.get("RAY_ADDRESS"))


def _call_all(callbacks: Sequence[StepCallback], record: dict[str, Any]) -> None:
    for callback in callbacks:
        callback(dict(record))


def _defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields that Python's users need not give."""
    model = tree.get("model")
    path = str(model.get("path", "run") if isinstance(model, Mapping) else "run")
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name).strip("-._") or "run"
    return {"run": {"name": f"{words}-{time.strftime('%Y%m%d-%H%M%S')}"}, "generator": {"engine": default_engine()}}


def _layout(held: HeldRows, key: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that follow from the rows: their split, and that there is no answer where no column has one."""
    data = tree["data"]
    found: dict[str, Any] = {}
    if held.split is not None and "split" not in (data if key == "data" else data["eval"]):
        found[f"{key}.split"] = held.split
    if key == "data" and "answer" not in data:
        default = DataConfig.model_fields["answer"].default
        if default not in held.columns and not isinstance(held.first.get("reward_model"), Mapping):
            found["data.answer"] = None
    return found


def _model_path(model: Any) -> str:
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise ConfigError(
        f"model: a {type(model).__name__} lies in this process alone, and the run's workers load models from files; save it "
        f"with model.save_pretrained(folder) and tokenizer.save_pretrained(folder), and give the folder"
    )
