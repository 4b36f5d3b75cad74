"""`pods compare`: arms against a baseline, from runs' folders or a sweep's."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pods_cluster.client.figure_command import read_run, refuse_twice
from pods_cluster.client.option_values import finite
from pods_cluster.client.sweep import SWEEP_FILE
from pods_cluster.config import ConfigError
from pods_cluster.telemetry.arm_comparison import ACCURACY, AXES, Comparison, averaged, compare
from pods_cluster.telemetry.curves import Axis, CurveError, RunSeries, arms, curve
from pods_cluster.telemetry.number_format import MISSING, compact, percent
from pods_cluster.telemetry.run_folder import RunFolderError
from pods_cluster.telemetry.speedup import SHARE, Ratio, Target

FIGURE_AXES: tuple[Axis, ...] = ("training-minutes", "steps")


def compare_runs(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]RUN", help="Runs' folders, those of one label are its seeds; or a sweep's folder."
        ),
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Label that others are compared with; by default the first.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help=f"What is compared; by default {ACCURACY}. One of training steps, as reward: means over ten."
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Value to reach, as in 0.8.", callback=finite)] = None,
    share: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Without --target: this share of the baseline's best (0.99)."
        ),
    ] = None,
    gain: Annotated[
        float | None,
        typer.Option(callback=finite, help="Without --target: so much above the baseline's start, as in 0.05."),
    ] = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="Only measured points count, as in the paper; else lines between them do.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one line for each arm and axis.")] = False,
    figure: Annotated[bool, typer.Option("--figure", help="Draw it too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figure; by default figures/ beside the first run.")
    ] = None,
) -> None:
    """Compare arms with a baseline: accuracy, time to a target, speed-up with its 95 % interval over seeds.

    `pods compare runs/my-sweep`, or `pods compare pods=runs/a pods=runs/b grpo=runs/c grpo=runs/d --baseline grpo`.
    """
    grouped, given = read_arms(runs)
    goal = target_of(given)
    if target is not None or gain is not None or share is not None:
        goal = Target(target, share or goal.share, gain)
    wanted = metric or given.get("metric") or ACCURACY
    grouped = averaged(grouped, wanted)
    try:
        found = compare(grouped, baseline=baseline or given.get("baseline"), metric=wanted, target=goal, hold=hold)
    except CurveError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print(json.dumps(found.as_dict()))
    elif as_csv:
        rows = list(found.rows())
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    else:
        show(found, Console())
    if figure or out is not None:
        place = out or _folder_of(runs[0]) / "figures"
        for path in draw(grouped, wanted, place):
            Console(stderr=as_json or as_csv).print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


def read_arms(arguments: list[str]) -> tuple[dict[str, list[RunSeries]], dict[str, Any]]:
    """(runs by label, what a sweep's file says of baseline, metric and target) of `[LABEL=]RUN` and folders of sweeps.

    Runs of a sweep that were not started, or have no step yet, are left out. Raises ConfigError and RunFolderError.
    """
    refuse_twice([argument for argument in arguments if not (Path(argument).expanduser() / SWEEP_FILE).is_file()])
    labels: list[str | None] = []
    series: list[RunSeries] = []
    given: dict[str, Any] = {}
    for argument in arguments:
        file = Path(argument).expanduser() / SWEEP_FILE
        if not file.is_file():
            label, run = read_run(argument)
            labels.append(label)
            series.append(run)
            continue
        given = {**_sweep_file(file), **given}
        for arm, names in _sweep_file(file)["arms"].items():
            for name in names:
                try:
                    _, run = read_run(str(file.parent / name))
                except (ConfigError, RunFolderError):
                    continue
                if any(given["metric"] in record for record in run.records):
                    labels.append(arm)
                    series.append(run)
    if not series:
        raise ConfigError(f"{', '.join(arguments)}: no run of it has a step yet; there is nothing to compare")
    grouped = arms(series, labels)
    if given.get("baseline") not in grouped:  # of a sweep that has come no further
        given = {**given, "baseline": None}
    return grouped, given


def target_of(given: dict[str, Any]) -> Target:
    """The target that a sweep's file names, of what `read_arms` gives; without one: 99 % of the baseline's best."""
    return Target(given.get("target"), given.get("share") or SHARE, given.get("gain"))


def _sweep_file(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(found["arms"], dict) or not isinstance(found["metric"], str):
            raise TypeError
    except (OSError, yaml.YAMLError, TypeError, KeyError, UnicodeDecodeError):
        raise ConfigError(f"{file}: is not the file that `pods sweep` writes; run the sweep again") from None
    return found


def compare_folder(folder: Path) -> Comparison:
    """The comparison of a sweep's folder, with the baseline and the target that its file names. Raises CurveError."""
    grouped, given = read_arms([str(folder)])
    return compare(grouped, baseline=given["baseline"], metric=given["metric"], target=target_of(given))


def draw(grouped: dict[str, list[RunSeries]], metric: str, folder: Path, name: str = "comparison") -> list[Path]:
    """The metric and the training reward against training time and updates. Raises OSError."""
    from pods_cluster.telemetry.comparison_figure import save_comparison

    panels, axes = [], []
    for what in (metric, "reward"):
        for axis in FIGURE_AXES:
            try:
                panels.append((what, [curve(label, runs, what, axis) for label, runs in grouped.items()]))
            except CurveError:  # no reward is told before the first step
                continue
            axes.append(axis)
    return save_comparison(panels, axes, folder, name=name)


def _folder_of(argument: str) -> Path:
    path = Path(argument.rpartition("=")[2] if not Path(argument).is_dir() else argument).expanduser()
    return path if (path / SWEEP_FILE).is_file() else path.parent


def show(found: Comparison, console: Console) -> None:
    """Print the comparison as tables."""
    console.print(render(found))


def render(found: Comparison) -> RenderableType:
    """The comparison for a terminal: what each arm came to, and how much sooner it reached the target."""
    accuracy = found.metric.endswith("accuracy")
    value = (lambda number: percent(number, 1)) if accuracy else compact
    results = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{found.metric}{' (%)' if accuracy else ''}",
        title_justify="left",
    )
    for column in ("arm", "seeds", "before", "after", "95 %", "best", "reward", "steps", "minutes"):
        results.add_column(column, justify="left" if column == "arm" else "right", no_wrap=column in ("arm", "95 %"))
    for arm in found.arms:
        scale = 100 if accuracy else 1
        first, final, best = (
            f"{100 * each:.1f}" if accuracy else compact(each) for each in (arm.first, arm.final, arm.best)
        )
        band = f"{scale * arm.low:.3g}–{scale * arm.high:.3g}" if arm.low < arm.high else MISSING
        results.add_row(escape(arm.label), str(len(arm.runs)), first, final, band, best, compact(arm.reward),
                        f"{arm.steps:,}", f"{arm.minutes:.1f}")  # fmt: skip
    return Group(results, *_speed_ups(found, value), *(Text(line, style="dim") for line in _remarks(found)))


def _where_from(target: Target, value: Any) -> str:
    if target.value is not None:
        return ""
    return (
        f" ({100 * target.share:.0f} % of its best)"
        if target.gain is None
        else f" (its start and {value(target.gain)})"
    )


def _speed_ups(found: Comparison, value: Any) -> list[Table]:
    """A row for each arm and axis: narrow enough for a log of 80 columns."""
    others = [arm for arm in found.arms if arm.label != found.baseline and arm.axes]
    base = next(arm for arm in found.arms if arm.label == found.baseline)
    if not others:
        return []
    goal = next(iter(base.axes.values())).ratio.target
    told = value(goal) + _where_from(found.target, value)
    title = f"times sooner than {escape(found.baseline)} at {told}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("arm", "over", found.baseline, "arm at", "sooner", "95 %"):
        table.add_column(escape(column), justify="left" if column in ("arm", "over") else "right")
    for arm in others:
        there = [(axis, arm.axes[axis].ratio) for axis in AXES if axis in arm.axes]
        for place, (axis, ratio) in enumerate(there):
            table.add_row(
                escape(arm.label) if not place else "",
                axis,
                _reached(ratio.baseline_at),
                _reached(ratio.arm_at),
                _sooner(ratio),
                _interval(ratio),
            )
    return [table]


def _reached(at: float | None) -> str:
    return "never" if at is None else compact(at)


def _sooner(ratio: Ratio) -> str:
    """The ratio, or what bounds it where only one of the two reached the target."""
    if ratio.value is not None:
        return f"{ratio.value:.2f}"
    if ratio.at_least is not None:
        return f"> {ratio.at_least:.2f}"
    return MISSING if ratio.at_most is None else f"< {ratio.at_most:.2f}"


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None or math.isinf(ratio.low):
        return MISSING
    return f"{ratio.low:.2f}–{f'{ratio.high:.2f}' if ratio.high < 1e6 else '∞'}"


def _remarks(found: Comparison) -> list[str]:
    lines = [f"{axis} left out: {why}" for axis, why in found.left_out.items()]
    seeds = [against.ratio.seeds for arm in found.arms for against in arm.axes.values()]
    if seeds and max(seeds) == 1:
        lines.append("one seed: no interval")
    elif seeds and max(seeds) < 5:
        lines.append(f"{max(seeds)} seeds: a bootstrap over so few is too narrow")
    return lines
