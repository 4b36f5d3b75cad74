"""What an arm's steps come to, and the table of all arms (pure)."""

from __future__ import annotations

from collections import Counter
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
    """The result as a table in Markdown, one run of an arm a row; one that failed says why.

    An arm of several rounds has one more row: the median over its rounds of its median seconds a step.
    """
    title = (
        "arm | n, m | staleness | s a step: median, mean | tokens/s: made, trained | updates in s | "
        "right in training: first three → last three | held-out, greedy | s to target | memory of the card, GB | "
        "card busy | idle: engine, learner"
    )
    lines = [f"| {title} |", "|" + "---|" * (title.count("|") + 1)]
    arms = result["arms"]
    runs = Counter(arm["name"] for arm in arms)
    lines += [_line(_cells(arm, f", round {arm['round']}" if runs[arm["name"]] > 1 else "")) for arm in arms]
    measured = Counter(arm["name"] for arm in arms if "median_seconds" in arm)
    last = {arm["name"]: arm for arm in arms}
    for name, seconds in median_seconds(arms).items():
        if measured[name] > 1:
            shape = _shape(last[name], f", median of {measured[name]} rounds")
            lines.append(_line([*shape, f"{seconds:.2f}", *[""] * 8]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shape(arm: Mapping[str, Any], which: str) -> list[str]:
    return [arm["name"] + which, f"{arm['n']}, {arm['m']}", str(arm["staleness"])]


def _cells(arm: Mapping[str, Any], which: str) -> list[str]:
    shape = _shape(arm, which)
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


def median_seconds(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By arm: the median over its rounds of its median seconds a step; rounds without any do not count."""
    rounds: dict[str, list[float]] = {}
    for arm in arms:
        if "median_seconds" in arm:
            rounds.setdefault(arm["name"], []).append(arm["median_seconds"])
    return {name: median(seconds) for name, seconds in rounds.items()}


def ratios(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each arm of ours, TRL's seconds a step over its own: the first arm of TRL with the same n and as many cards.

    Of several rounds the median over rounds of each arm's median seconds counts.
    """
    seconds = median_seconds(arms)
    trl: dict[tuple[int, int], float] = {}
    for arm in arms:
        if arm["peer"] == "trl" and arm["name"] in seconds:
            trl.setdefault((arm["n"], arm["cards"]), seconds[arm["name"]])
    return {
        arm["name"]: trl[arm["n"], arm["cards"]] / seconds[arm["name"]]
        for arm in arms
        if arm["peer"] == "ours" and arm["name"] in seconds and (arm["n"], arm["cards"]) in trl
    }


def config_of(arms: Sequence[Mapping[str, Any]]) -> str | dict[str, str]:
    """The configuration of ours: one name, or one by arm where they differ."""
    by_arm = {arm["name"]: arm["config"] for arm in arms if arm["peer"] == "ours"}
    names = set(by_arm.values())
    return by_arm if len(names) > 1 else names.pop() if names else "none of ours"
