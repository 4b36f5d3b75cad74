"""The figure of `benchmarks/overlap.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_cluster.telemetry.figure import BLUE, GREEN, ORANGE, SOFT, STYLE


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Five panels, one a part of the benchmark."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(12.5, 6.4), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
        axes = figure.subplots(2, 3)
        _bars(
            axes[0][0],
            "Steps a second, stages balanced",
            [f"k = {row['staleness']}" for row in result["overlap"]],
            [row["steps_per_second"] for row in result["overlap"]],
            [f"{row['speedup']:.2f} ×" for row in result["overlap"]],
        )
        settled = result["settling"][1:]
        _bars(
            axes[0][1],
            "Tokens saved (n = 64, m = 16, binary rewards)",
            [row["settle"] for row in settled],
            [row["saved_share"] for row in settled],
            [f"{row['saved_share']:.0%}" for row in settled],
        )
        axes[0][1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        every = result["settling"]
        axis = axes[0][2]
        places = range(len(every))
        axis.bar([place - 0.19 for place in places], [row["mean_length"] for row in every], 0.36, color=SOFT,
                 label="all finished")  # fmt: skip
        axis.bar([place + 0.19 for place in places], [row["kept_length"] for row in every], 0.36, color=ORANGE,
                 label="kept")  # fmt: skip
        axis.set_xticks(list(places), [row["settle"] for row in every])
        axis.set_title("Length of rollouts (tokens)")
        axis.set_ylim(0, 1.35 * max(row["mean_length"] for row in every))
        axis.legend(loc="upper right", ncols=2)
        axis = axes[1][0]
        rows = result["generators"]
        counts = [row["generators"] for row in rows]
        bound = rows[0]["learner_bound_steps_per_second"]
        axis.plot(counts, [row["steps_per_second"] for row in rows], "o-", color=BLUE)
        axis.axhline(bound, color=SOFT, linestyle="--", linewidth=1)
        axis.annotate("the learner's own pace", (counts[0], bound), (0, 4), textcoords="offset points", color=SOFT)
        axis.set_ylim(0, 1.2 * bound)
        axis.set_xticks(counts)
        axis.set_title("Steps a second against generators (k = 1)")
        axis.set_xlabel("generators")
        axis = axes[1][1]
        for fixed, label, color in (("m", "m = 8, n grows", GREEN), ("n", "n = 64, m grows", ORANGE)):
            key, other, at = ("n", "m", 8) if fixed == "m" else ("m", "n", 64)
            rows = sorted((row for row in result["bytes"] if row[other] == at), key=lambda row: row[key])
            axis.plot([row[key] for row in rows], [row["bytes_per_step"] / 1024 for row in rows], "o-", color=color,
                      label=label)  # fmt: skip
        axis.set_ylim(bottom=0)
        axis.legend()
        axis.set_title("KiB to the learner a step")
        axis.set_xlabel("rollouts a prompt")
        axis = axes[1][2]
        rows = result["selector_seconds"]
        axis.plot([row["length"] for row in rows], [1e6 * row["seconds_per_group"] for row in rows], "o-", color=BLUE)
        axis.set_xscale("log")
        axis.set_ylim(0, 1.25e6 * max(row["seconds_per_group"] for row in rows))
        axis.set_title("Selector time a group of 64 (µs)")
        axis.set_xlabel("longest rollout (tokens)")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _bars(axis: Any, title: str, names: list[str], values: list[float], labels: list[str]) -> None:
    bars = axis.bar(names, values, 0.55, color=BLUE)
    axis.bar_label(bars, labels, padding=3)
    axis.set_title(title)
    axis.margins(y=0.18)
