"""The figure of `benchmarks/arms.py`: rewards and accuracy by step and by time, and what an arm costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

COLORS = {"sync": "#6b7280", "k1": "#0f766e", "k2": "#2563eb", "k1-waves": "#d97706", "k1-planned": "#9333ea"}
LABELS = {
    "sync": "staleness 0",
    "k1": "staleness 1",
    "k2": "staleness 2",
    "k1-waves": "staleness 1, waves",
    "k1-planned": "staleness 1, planned n",
}
SMOOTH = 5
"""Steps of the running mean of the reward."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Means over seeds; bands and whiskers are the lowest and the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from pods_cluster.telemetry.figure import STYLE

    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["arms"]:
        arms.setdefault(row["arm"], []).append(row)
    with pyplot.rc_context(cast(Any, STYLE)):
        figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
        for name, rows in arms.items():
            color, label = COLORS.get(name, "#111827"), LABELS.get(name, name)
            # Of groups that are stopped early the plain mean has too few rollouts of easy prompts.
            censored = any("reward/uncensored" in row["curves"] for row in rows)
            steps, rewards = _curves(rows, "reward/uncensored" if censored else "reward")
            smooth = np.array([np.convolve(r, np.ones(SMOOTH) / SMOOTH, "valid") for r in rewards])
            axes[0].plot(steps[SMOOTH - 1 :], smooth.mean(0), color=color, lw=1.4, label=label)
            steps, accuracy = _curves(rows, "eval/greedy_accuracy")
            if len(steps):
                axes[1].plot(steps, 100 * accuracy.mean(0), "o-", ms=4, color=color, label=label)
                axes[1].fill_between(steps, 100 * accuracy.min(0), 100 * accuracy.max(0), color=color, alpha=0.12, lw=0)
        names = list(arms)
        tokens = [np.array([row["tokens_sampled"] / row["trained"] for row in arms[name]]) for name in names]
        for place, (name, values) in enumerate(zip(names, tokens, strict=True)):
            axes[2].barh(place, values.mean(), height=0.55, color=COLORS.get(name, "#111827"))
            axes[2].plot([values.min(), values.max()], [place, place], color="#111827", lw=1)
        axes[0].set(title=f"Mean reward (running mean of {SMOOTH} steps)", xlabel="step")
        axes[1].set(title="Greedy accuracy on held-out rows, %", xlabel="step")
        axes[2].set(title="Tokens sampled for one rollout trained", yticks=range(len(names)))
        axes[2].set_yticklabels([LABELS.get(name, name) for name in names])
        axes[2].invert_yaxis()
        axes[1].legend(loc="lower right")
        figure.savefig(path)
        pyplot.close(figure)


def _curves(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [t] and values [seeds, t], as far as all seeds have them."""
    curves = [row["curves"][name] for row in rows if name in row["curves"]]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    length = min(len(curve["steps"]) for curve in curves)
    return np.array(curves[0]["steps"][:length]), np.array([curve["values"][:length] for curve in curves])
