"""The figure that compares runs: one panel a metric, one line an arm, bands for their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pods_cluster.telemetry.curves import LABELS, Axis, Curve
from pods_cluster.telemetry.figure import INK, STYLE

FORMATS = ("png", "svg", "pdf")
COLORS = ("#0f766e", "#d97706", "#2563eb", "#9333ea", "#be123c", "#4b5563", "#65a30d", "#0891b2")
DASHES = ("-", "--", ":")
"""The next one is taken each time that the colours have run out."""
LEGEND_INSIDE = 6
"""Arms whose legend has room among the lines; that of more stands beside the last panel."""
TITLES = {
    "eval/greedy_accuracy": "Held-out accuracy (greedy)",
    "eval/sampled_accuracy": "Held-out accuracy (sampled)",
    "reward": "Training reward",
}


def save_comparison(
    panels: Sequence[tuple[str, Sequence[Curve]]],
    axis: Axis | Sequence[Axis],
    folder: Path,
    *,
    name: str = "comparison",
    title: str = "",
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Draw `panels` (metric, its curves) side by side into `<folder>/<name>.<format>`; returns the files.

    `axis` is what is across: of all panels, or one for each.

    Raises OSError where the folder cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across: list[Axis] = [axis] * len(panels) if isinstance(axis, str) else list(axis)
    folder.mkdir(parents=True, exist_ok=True)
    saved: list[Path] = []
    # Text stays text in SVG and PDF, so that a paper's fonts and searches work.
    style = STYLE | {"svg.fonttype": "none", "pdf.fonttype": 42}
    with matplotlib.rc_context(style):  # pyright: ignore[reportArgumentType]
        beside = max((len(curves) for _, curves in panels), default=0) > LEGEND_INSIDE
        size = (5.2 * len(panels) + 0.6 + 2.2 * beside, 3.9)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for at, (metric, curves) in enumerate(panels):
            panel = axes[at]
            for place, curve in enumerate(curves):
                color = COLORS[place % len(COLORS)]
                seeds = f" ({curve.runs} seeds)" if curve.runs > 1 else ""
                marker = "o" if len(curve.x) <= 30 else ""
                panel.plot(
                    curve.x,
                    curve.y,
                    color=color,
                    linestyle=DASHES[place // len(COLORS) % len(DASHES)],
                    linewidth=1.8,
                    marker=marker,
                    markersize=3.5,
                    label=curve.label + seeds,
                )
                if bool((curve.low < curve.high).any()):
                    panel.fill_between(
                        curve.x, curve.low, curve.high, color=color, alpha=0.07 if beside else 0.16, linewidth=0
                    )
            panel.set_title(TITLES.get(metric, metric), parse_math=False)
            panel.set_xlabel(LABELS[across[at]])
            panel.margins(x=0.02)
            if metric.startswith("eval/") and metric.endswith("accuracy"):
                panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
            if at == 0 and not beside:
                _as_written(panel.legend(loc="best"))
        if beside:
            handles = axes[0].get_legend_handles_labels()
            _as_written(axes[-1].legend(*handles, loc="center left", bbox_to_anchor=(1.02, 0.5)))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False)
        for kind in formats:
            path = folder / f"{name}.{kind}"
            figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)
            saved.append(path)
    return saved


def _as_written(legend: Any) -> None:
    """Labels are a user's: a `$` in one begins no formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)
