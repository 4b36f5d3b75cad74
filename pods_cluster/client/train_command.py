"""`pods train`: a run from a configuration, in this terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pods_cluster.client.completion import override_names
from pods_cluster.config import load_config

ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.YAML", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Overrides, as in learner.learning_rate=1e-5.", autocompletion=override_names
    ),
]


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step in place of the live display.")] = False,
) -> None:
    """Train a model: `pods train run.yaml learner.workers=2`."""
    from pods_cluster.client.refusals import how_to_resume, refuse_start
    from pods_cluster.telemetry.report import render

    loaded, console = load_config(config, overrides or []), Console()
    refuse_start(loaded, resume=resume)
    from pods_cluster.client.driver import train as run
    from pods_cluster.run.checkpoints import CheckpointError

    again = "pods train " + shlex.join([str(config), *(overrides or []), "--resume"])
    try:
        summary = run(loaded, resume=resume, console=console, live=False if plain else None)
    except Exception as error:
        if not isinstance(error, CheckpointError) and (
            hint := how_to_resume(loaded, again)
        ):  # that one says what to do
            error.add_note(hint)
        raise
    console.print(render(summary))
    if summary.status == "stopped" and (hint := how_to_resume(loaded, again)):
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
    if summary.trained_nothing:
        raise typer.Exit(1)
