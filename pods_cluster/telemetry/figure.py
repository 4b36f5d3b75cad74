"""The figures of a run: accuracy and reward against steps and wall clock, and where the seconds of its steps went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pods_cluster.telemetry.catalog import STAGES
from pods_cluster.telemetry.step_record import Record, merge_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1f2430", "#6b7280", "#e7e9ee"
GREEN, BLUE, ORANGE = "#0f766e", "#2563eb", "#d97706"
STAGE_COLORS = {
    "generate": "#2f7fb8",
    "fetch": "#c9cdd6",
    "update": "#e59a3c",
    "publish": "#58a67a",
    "eval": "#d9d3a6",
    "checkpoint": "#b0796b",
}
BINS = 48
"""Bars in the figure of seconds by stage; steps are averaged where there are more."""
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
}


def save_figures(records: Iterable[Mapping[str, Any]], folder: Path, *, title: str = "") -> list[Path]:
    """Draw `curve.png` and `seconds.png` into the folder; returns those for which there are data.

    Raises OSError where the folder cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    merged = merge_steps(records)
    folder.mkdir(parents=True, exist_ok=True)
    saved: list[Path] = []
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        for name, draw, size in (("curve.png", _curve, (9.6, 5.8)), ("seconds.png", _seconds, (9.6, 3.4))):
            # a Figure of its own draws with Agg: no display, and nothing left in pyplot's state
            figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
            if draw(figure, merged, title):
                figure.savefig(folder / name)
                saved.append(folder / name)
    return saved


def _curve(figure: Figure, records: Sequence[Record], title: str) -> bool:
    """Accuracy above, reward below; steps on the left, time on the right, on common scales."""
    accuracies = [
        (name, label, color, marker)
        for name, label, color, marker in (
            ("eval/greedy_accuracy", "greedy", GREEN, "o"),
            ("eval/sampled_accuracy", "sampled", BLUE, "s"),
        )
        if _points(records, name)
    ]
    has_reward = bool(_points(records, "reward"))
    rows = [row for row, wanted in (("accuracy", accuracies), ("reward", has_reward)) if wanted]
    if not rows:
        return False
    from matplotlib.ticker import MaxNLocator

    if len(rows) == 1:
        figure.set_size_inches(figure.get_figwidth(), 3.4)
    axes = figure.subplots(len(rows), 2, sharey="row", sharex="col", squeeze=False)
    scale, unit = _time_unit(max((record.get("elapsed", 0.0) for record in records), default=0.0))
    for column, (key, factor) in enumerate((("step", 1.0), ("elapsed", 1 / scale))):
        for row, what in enumerate(rows):
            axis: Axes = axes[row][column]
            if what == "accuracy":
                for name, label, color, marker in accuracies:
                    _accuracy_line(axis, _points(records, name, key, factor), label, color, marker)
            else:
                _reward_lines(axis, records, key, factor)
    for column, key in enumerate(("step", "elapsed")):
        reach = [record[key] for record in records if key in record]
        low, high = (min(reach), max(reach)) if key == "step" else (min(reach) / scale, max(reach) / scale)
        span = max(high - low, 1.0 if key == "step" else 1e-9)
        # room on the left for the first value's label
        axes[-1][column].set_xlim(low - (0.13 if accuracies else 0.02) * span, high + 0.02 * span)
    axes[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes[-1][0].set_xlabel("learner step")
    axes[-1][1].set_xlabel(f"wall clock ({unit})")
    for row, what in enumerate(rows):
        axes[row][0].set_title("Held-out accuracy" if what == "accuracy" else "Training reward")
        if what == "accuracy":
            axes[row][0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            values = [value for name, *_ in accuracies for _, value in _points(records, name)]
            low, high = min(values), max(values)
            room = max(0.12 * (high - low), 0.02)
            axes[row][0].set_ylim(max(low - room, -0.02), min(high + 1.6 * room, 1.04))
        handles, labels = axes[row][1].get_legend_handles_labels()
        axes[row][1].legend(
            handles, labels, loc="lower right", ncols=len(handles), bbox_to_anchor=(1.0, 1.0), borderaxespad=0
        )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return True


def _accuracy_line(axis: Axes, points: list[tuple[float, float]], label: str, color: str, marker: str) -> None:
    xs, ys = zip(*points, strict=True)
    size = 4 if len(points) <= 60 else 0
    axis.plot(xs, ys, color=color, marker=marker, markersize=size, linewidth=1.8, label=label, clip_on=False)
    # first and last value are what a reader looks for; greedy is written a little above its line, sampled below
    up = 1 if label == "greedy" else -1
    ends = [(0, ys[0], (-6, 3 * up), "center")]
    if len(points) > 1:
        # clear of the part of the line that runs under the text
        tail = ys[-max(len(ys) // 10, 1) :]
        ends.append((-1, max(tail) if up > 0 else min(tail), (0, 7 * up), "bottom" if up > 0 else "top"))
    for index, y, offset, vertical in ends:
        axis.annotate(
            f"{100 * ys[index]:.0f} %",
            (xs[index], y),
            xytext=offset,
            textcoords="offset points",
            ha="right",
            va=vertical,
            color=color,
            fontsize=9,
            fontweight="bold",
        )


def _reward_lines(axis: Axes, records: Sequence[Record], key: str, factor: float) -> None:
    for name, label, color in (("reward", "all rollouts", GREEN), ("reward/kept", "kept", ORANGE)):
        points = _points(records, name, key, factor)
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        if len(points) < 8:
            axis.plot(xs, ys, color=color, linewidth=1.8, label=label, marker="o", markersize=4, clip_on=False)
            continue
        axis.plot(xs, ys, color=color, linewidth=0.8, alpha=0.3)
        axis.plot(xs, _smooth(ys), color=color, linewidth=1.8, label=f"{label} (smoothed)")


def _seconds(figure: Figure, records: Sequence[Record], title: str) -> bool:
    """Seconds a step, stacked by stage, over the run; the legend has each stage's share of the total."""
    from matplotlib.ticker import MaxNLocator

    totals = {stage: sum(_value(record, f"timing_s/{stage}") for record in records) for stage in STAGES}
    # the evaluation before the first step is in the totals alone
    steps = [record for record in records if record.get("timing_s/step") or record.get("timing_s/update")]
    spent = sum(totals.values())
    if not steps or spent <= 0:
        return False
    axis = figure.subplots()
    first, last = steps[0]["step"], steps[-1]["step"]
    width = max(math.ceil((last - first + 1) / BINS), 1)
    bins: dict[int, list[Record]] = {}
    for record in steps:
        bins.setdefault((record["step"] - first) // width, []).append(record)
    centers = [first + index * width + (width - 1) / 2 for index in bins]
    base = [0.0] * len(bins)
    for stage in STAGES:
        if totals[stage] <= 0:
            continue
        heights = [sum(_value(record, f"timing_s/{stage}") for record in group) / len(group) for group in bins.values()]
        label = f"{stage}  {100 * totals[stage] / spent:.1f} %"
        axis.bar(centers, heights, width * 0.86, bottom=base, color=STAGE_COLORS[stage], label=label, linewidth=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    notes = [f"means of {width} steps"] if width > 1 else []
    if stages_overlap(steps):
        notes.append("stages overlap")
    axis.set_title("Seconds a step by stage" + (f" ({', '.join(notes)})" if notes else ""))
    axis.set_xlabel("learner step")
    axis.grid(axis="x", visible=False)
    axis.margins(x=0.01)
    if len(bins) == 1:
        axis.set_xlim(centers[0] - 3 * width, centers[0] + 3 * width)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    handles, labels = axis.get_legend_handles_labels()
    # the order of the stack, top first
    axis.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return True


def stages_overlap(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the stages take longer than the steps that they belong to, as they do at a staleness above 0."""
    spent = stepping = 0.0
    for record in records:
        if step := _value(record, "timing_s/step"):
            stepping += step
            spent += sum(_value(record, f"timing_s/{stage}") for stage in STAGES if stage not in ("eval", "checkpoint"))
    return stepping > 0 and spent > 1.05 * stepping


def _value(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _points(records: Sequence[Record], name: str, key: str = "step", factor: float = 1.0) -> list[tuple[float, float]]:
    return [
        (record[key] * factor, float(record[name]))
        for record in records
        if isinstance(record.get(name), (int, float)) and math.isfinite(record[name]) and key in record
    ]


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over a window of about a tenth of the run, cut at the ends."""
    half = max(len(values) // 20, 1)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    smooth = []
    for index in range(len(values)):
        start, stop = max(index - half, 0), min(index + half + 1, len(values))
        smooth.append((sums[stop] - sums[start]) / (stop - start))
    return smooth


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")
