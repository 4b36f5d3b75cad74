"""`pods figure`: one figure of one run or several, for papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from pods_cluster.config import ConfigError

METRICS = ("eval/greedy_accuracy", "reward")


def figure(
    runs: Annotated[
        list[str], typer.Argument(metavar="[LABEL=]RUN", help="Folders of runs; those of one label are its seeds.")
    ],
    x: Annotated[
        str,
        typer.Option("--x", help="Horizontal axis: steps, minutes, training-minutes, gpu-seconds, rollouts or tokens."),
    ] = "minutes",
    y: Annotated[
        list[str] | None,
        typer.Option("--y", metavar="METRIC", help="Vertical axis, a panel each; by default accuracy and reward."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figure; by default figures/ of the first run.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the files, without an ending.")] = "comparison",
    title: Annotated[str, typer.Option(help="A line above the figure.")] = "",
    formats: Annotated[str, typer.Option("--formats", help="Which files: png, svg, pdf.")] = "png,svg,pdf",
) -> None:
    """Draw runs side by side as PNG, SVG and PDF: `pods figure pods=runs/a pods=runs/b grpo=runs/c --x minutes`.

    Bands are 95 % intervals: over the seeds of a label, or of a single run's held-out rows.
    """
    from pods_cluster.telemetry.comparison_figure import FORMATS, save_comparison
    from pods_cluster.telemetry.curves import AXES, CurveError, arms, curve

    if x not in AXES:
        raise ConfigError(f"--x: {x!r} is no axis; choose one of {', '.join(AXES)}")
    wanted = [kind.strip().lower() for kind in formats.split(",") if kind.strip()]
    if unknown := [kind for kind in wanted if kind not in FORMATS] or (None if wanted else [formats]):
        raise ConfigError(f"--formats: {unknown[0]!r} is none of {', '.join(FORMATS)}")
    if not name.strip() or Path(name).name != name:
        raise ConfigError(f"--name: {name!r} is no name of a file; the folder goes to --out")
    refuse_twice(runs)
    labels, series = zip(*(read_run(argument) for argument in runs), strict=True)
    grouped = arms(series, labels)
    panels, lacking = [], []
    for metric in y or METRICS:
        try:
            panels.append((metric, [curve(label, members, metric, x) for label, members in grouped.items()]))
        except CurveError as error:
            if y:
                raise ConfigError(f"--y: {error}") from None
            lacking.append(str(error))
    if not panels:
        raise ConfigError(f"nothing to draw: {'; '.join(lacking)}")
    folder = out or _place(_split(runs[0])[1]) / "figures"
    console = Console()
    for path in save_comparison(panels, x, folder, name=name, title=title, formats=wanted):
        console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


def refuse_twice(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a run that is given twice under one label: it would count as two seeds that agree."""
    seen: set[tuple[str, Path]] = set()
    for argument in arguments:
        label, path = _split(argument)
        run = (label, _place(path).resolve())
        if run in seen:
            raise ConfigError(f"{argument}: is given twice, and would count as two seeds; leave one out")
        seen.add(run)


def read_run(argument: str) -> tuple[str | None, Any]:
    """(label or None, series) of `LABEL=FOLDER` or `FOLDER`. Raises RunFolderError."""
    from pods_cluster.telemetry.curves import RunSeries
    from pods_cluster.telemetry.run_folder import RunFolder

    label, path = _split(argument)
    folder = RunFolder.open(_place(path))
    config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    return label or None, RunSeries.of(folder.name, folder.read_metrics(), config if isinstance(config, dict) else {})


def _split(argument: str) -> tuple[str, str]:
    """(label or an empty text, path) of `LABEL=PATH` or `PATH`."""
    label, equals, path = argument.rpartition("=")
    return ("", argument) if equals and Path(argument).is_dir() else (label, path)  # a folder with = in its name


def _place(path: str) -> Path:
    """The folder of a run, given by its path or by its name in the folder `runs`. Raises ConfigError."""
    for place in (Path(path).expanduser(), Path("runs") / path):
        if place.is_dir():
            return place
    raise ConfigError(f"{path}: there is no such run; give a run's folder, or its name in the folder runs")
