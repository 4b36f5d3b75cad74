"""The figure of `benchmarks/scale.py`: tokens a second against generators, and what sets the pace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._result_file import records
from pods_cluster.telemetry.figure import BLUE, GREEN, INK, ORANGE, SOFT, STYLE

COLORS = {"generator": BLUE, "update": ORANGE, "publish": GREEN, "calls": "#9333ea", "controller": "#be123c",
          "selector": "#0891b2", "fetch": "#65a30d", "plan": INK}  # fmt: skip
NAMES = {"generator": "generators", "update": "update", "publish": "weight broadcast", "calls": "calls for the broadcast",
         "controller": "controller: groups", "selector": "selector", "fetch": "fetch", "plan": "plan"}  # fmt: skip


def draw(result: Mapping[str, Any], path: Path) -> None:
    """One panel for each model; lines with 64 ranks and with a learner that takes no time, points coloured by the bound."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = [row for row in records(result["sweep"]) if row["change"] == "as it is"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(4.0 * len(sizes), 3.9), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharex=True)
        for panel, size in zip(panels, sizes, strict=True):
            for ranks, style in ((64, "-"), (None, "--")):
                line = [row for row in rows if row["size"] == size and row["ranks"] == ranks]
                count, rate = [row["generators"] for row in line], [row["tokens_per_second"] for row in line]
                panel.plot(count, rate, style, color=SOFT, linewidth=1.2, zorder=1)
                panel.scatter(count, rate, c=[COLORS[row["bound"]] for row in line], s=34, zorder=2)
            ideal = line[0]["tokens_per_second"] / line[0]["efficiency"] / line[0]["generators"]
            panel.plot(count, [ideal * generators for generators in count], ":", color=SOFT, linewidth=1, zorder=0)
            panel.set(xscale="log", yscale="log", title=size, xlabel="generators")
            panel.set_xticks(count, [f"{generators:,}" for generators in count], minor=False)
            panel.minorticks_off()
        panels[0].set_ylabel("tokens a second (modelled)")
        seen = [name for name in COLORS if any(row["bound"] == name for row in rows)]
        marks = [Line2D([], [], marker="o", linestyle="", color=COLORS[name], label=f"bound: {NAMES[name]}")
                 for name in seen]  # fmt: skip
        marks += [
            Line2D([], [], color=SOFT, label="64 learner ranks"),
            Line2D([], [], color=SOFT, linestyle="--", label="learner takes no time"),
            Line2D([], [], color=SOFT, linestyle=":", label="engines always full"),
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
