"""`pods eval`: held-out accuracy of a checkpoint, an exported model or any model, with the run's own engine and rewards."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.text import Text

from pods_cluster.client.paths import absolute
from pods_cluster.config import Config, ConfigError, build_config, load_config
from pods_cluster.data import load_eval, load_tokenizer, resolved
from pods_cluster.environments.description import check_turns
from pods_cluster.generation.pool import GeneratorPool
from pods_cluster.run import checkpoints
from pods_cluster.run.cluster import connect
from pods_cluster.run.evaluation import evaluate
from pods_cluster.scoring.scorer_output import Printed

CLOSE_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate: its folder (or hub name), and the configuration of the run that it comes from."""

    model: str
    config: Path | None
    name: str


def find_target(path: str) -> Target:
    """A run's folder (its newest checkpoint, else its exported model), a checkpoint's, or a model.

    Raises ConfigError for a folder that is none of them.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return Target(path, None, path)
    if (folder / checkpoints.STATE_FILE).is_file():
        return Target(str((folder / "model").resolve()), _beside(folder.parent.parent), folder.name)
    if (folder / "checkpoints").is_dir():
        newest = checkpoints.latest(folder / "checkpoints")
        model = newest / "model" if newest is not None else folder / "model"
        return Target(str(model.resolve()), _beside(folder), f"{folder.name} {newest.name if newest else 'model'}")
    if (folder / "config.json").is_file():
        return Target(str(folder.resolve()), _beside(folder.parent), folder.name)
    raise ConfigError(f"{path}: holds neither a run, nor a checkpoint, nor a model; give one of these folders")


def _beside(folder: Path) -> Path | None:
    return folder / "config.yaml" if (folder / "config.yaml").is_file() else None


def target_config(target: Target, config: str | None, overrides: list[str]) -> Config:
    """The configuration to evaluate under: given, or that of the run which the target lies in."""
    source = config or target.config
    if source is None:
        about = "lies in no run's folder" if Path(target.model).is_dir() else "is no folder here"
        raise ConfigError(f"{target.name}: {about}; say how to evaluate it with --config run.yaml")
    tree: dict[str, Any] = load_config(source, overrides).model_dump(mode="json")
    tree["model"]["path"] = target.model
    tree["run"]["name"] += "-eval"
    built = absolute(build_config(tree))
    if built.data.eval is None:
        raise ConfigError("data.eval: left out, so there are no held-out rows; add it, as in data.eval.split=test")
    return built


def evaluate_target(config: Config, console: Console) -> dict[str, float]:
    """Start generators with the model's own weights, evaluate, and end them. Needs no learner."""
    tokenizer = load_tokenizer(config.model, light=True)
    held_out = load_eval(config, tokenizer)
    config = resolved(config, tokenizer, rows=None)
    check_turns(config, tokenizer)
    owned = not ray.is_initialized()
    with console.status("connecting to Ray"):
        connect(config)
    try:
        with console.status(f"evaluating {len(held_out)} rows"):
            return asyncio.run(_evaluate(config, list(held_out), console))
    finally:
        if owned:
            ray.shutdown()


async def _evaluate(config: Config, held_out: list[Any], console: Console) -> dict[str, float]:
    """Evaluate, and show what rewards print and why they fail: there is no run whose files would tell it."""

    def show(_worker: str, printed: Printed) -> None:
        for line in printed.lines:
            console.print(Text(f"{line.reward} prints: {line.text}", style="dim"))

    pool = GeneratorPool(config, None, printed=show)
    try:
        await pool.start()
        # There is no learner that publishes: the weights that the engines have loaded are the ones to evaluate.
        await pool.adopt_version(0)
        values = (await evaluate(pool, held_out, config)).values
        await pool.observe()
        for failure in pool.scoring.failures():
            console.print(Text(str(failure), style="yellow"))
        return values
    finally:
        try:
            await asyncio.wait_for(pool.close(), CLOSE_SECONDS)
        except TimeoutError:
            log.warning("the generators have not ended within %g s and are left to Ray", CLOSE_SECONDS)
