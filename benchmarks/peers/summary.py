"""What an arm's steps come to, and the table of all arms (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks._result_file import table

WARM = 2
"""Steps at the start that rates leave out: compilation, cold caches, the filling of the pipeline."""
WINDOW = 3
CURVE = ("step", "seconds", "at", "correct", "reward", "tokens_made", "tokens_trained")
Row = Mapping[str, Any]


def summarize(steps: Sequence[Row], evals: Sequence[Row], target: float) -> dict[str, Any]:
    """Seconds a step, tokens/s, accuracies of one arm; rates leave the first `WARM` steps out.

    `target_seconds`: seconds of steps until an evaluation on held-out rows reached `target`; None: none did.
    """
    found: dict[str, Any] = {"steps": len(steps), "steps_seconds": sum(step["seconds"] for step in steps)}
    warm = steps[WARM:]
    if warm:
        seconds = sum(step["seconds"] for step in warm)
        found |= {
            "median_seconds": median(step["seconds"] for step in warm),
            "mean_seconds": seconds / len(warm),
            "made_per_second": sum(step["tokens_made"] for step in warm) / seconds,
            "trained_per_second": sum(step["tokens_trained"] for step in warm) / seconds,
            "stages": _means(warm, "stages"),
            "idle": _means(warm, "idle"),
            "busy": _means(warm, "busy"),
        }
        for name in ("mismatch", "mean_staleness", "rollouts_made", "replaced"):
            values = [step[name] for step in warm if step.get(name) is not None]
            if values:
                found[name] = mean(values)
    right = [step["correct"] for step in steps if step.get("correct") is not None]
    if len(right) >= 2 * WINDOW:
        found["training_accuracy"] = {"first": mean(right[:WINDOW]), "last": mean(right[-WINDOW:])}
    if evals:
        found["held_out"] = {"before": evals[0]["accuracy"], "after": evals[-1]["accuracy"]}
        found["target_seconds"] = next((each["at"] for each in evals if each["accuracy"] >= target), None)
        found["evaluations"] = table(evals, ("step", "at", "accuracy", "seconds"))
    found["curve"] = table(steps, CURVE)
    return found


def _means(steps: Sequence[Row], name: str) -> dict[str, float]:
    """Mean of each of a step's named values; a step that lacks one counts as 0 where it has any."""
    have = [step[name] for step in steps if step.get(name)]
    names = dict.fromkeys(key for values in have for key in values)
    return {key: mean(values.get(key, 0.0) for values in have) for key in names}


def render_table(result: Mapping[str, Any]) -> str:
    """The result as a table in Markdown, one arm a row; an arm that failed says why."""
    title = (
        "arm | n, m | staleness | s a step: median, mean | tokens/s: made, trained | updates in s | "
        "right in training: first three → last three | held-out, greedy | s to target | memory of the card, GB | "
        "card busy | idle: engine, learner"
    )
    lines = [f"| {title} |", "|" + "---|" * (title.count("|") + 1)]
    lines += ["| " + " | ".join(_cells(arm)) + " |" for arm in result["arms"]]
    return "\n".join(lines) + "\n"


def _cells(arm: Mapping[str, Any]) -> list[str]:
    shape = [arm["name"], f"{arm['n']}, {arm['m']}", str(arm["staleness"])]
    if "median_seconds" not in arm:
        return [*shape, f"{arm['status']}: {arm.get('error', 'too few steps')[-200:]}".replace("\n", " "), *[""] * 8]
    training, held = arm.get("training_accuracy"), arm.get("held_out")
    reached = arm.get("target_seconds")
    idle = arm.get("idle") or {}
    return [
        *shape,
        f"{arm['median_seconds']:.2f}, {arm['mean_seconds']:.2f}",
        f"{arm['made_per_second']:,.0f}, {arm['trained_per_second']:,.0f}",
        f"{arm['steps']} in {arm['steps_seconds']:.0f}",
        f"{training['first']:.3f} → {training['last']:.3f}" if training else "",
        f"{held['before']:.1%} → {held['after']:.1%}" if held else "",
        (f"{reached:.0f}" if reached is not None else "not reached") if held else "",
        f"{arm['card']['peak_gb']:.1f}" if arm.get("card") else "",
        f"{arm['card']['busy']:.0%}" if "busy" in arm.get("card", {}) else "",
        ", ".join(f"{idle[pool]:.0%}" for pool in ("generator", "learner") if pool in idle),
    ]


def ratios(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each arm of ours, TRL's seconds a step (median) at the same n over its own."""
    trl = {
        arm["n"]: arm["median_seconds"] for arm in reversed(arms) if arm["peer"] == "trl" and "median_seconds" in arm
    }
    return {
        arm["name"]: trl[arm["n"]] / arm["median_seconds"]
        for arm in arms
        if arm["peer"] == "ours" and "median_seconds" in arm and arm["n"] in trl
    }
