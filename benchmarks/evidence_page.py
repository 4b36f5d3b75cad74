"""Makes docs/evidence.md from `benchmarks/results/evidence_cpu.json`, and its figures.

    python -m benchmarks.evidence_page

What was not run says so. Nothing on the page is written by hand but the questions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._result_file import records
from benchmarks.evidence_answers import RESULT
from benchmarks.evidence_claims import claim_lines, did_not_hold, points, reach_lines
from benchmarks.evidence_sections import GPU_PARTS, gpu_lines, gradient_lines, paced_lines
from pods_cluster.telemetry.comparison_figure import save_comparison
from pods_cluster.telemetry.curves import Axis, Curve, student_t

ROOT = Path(__file__).parents[1]
GPU_RESULT = ROOT / "benchmarks" / "results" / "evidence_h200.json"
GRADIENTS = ROOT / "benchmarks" / "results" / "gradient_noise.json"
PAGE = ROOT / "docs" / "evidence.md"
METRIC = "eval/greedy_accuracy"
THREE = ("grpo", "grpo-ga", "grpo-pods")

QUESTIONS = {
    "arms": (
        "Three arms",
        "GRPO-GA makes 64 answers and trains all, GRPO-PODS makes 64 and trains 8, GRPO makes 8 and trains 8. The paper's "
        "claim is time: PODS reaches what the baseline reaches at least 1.7 times sooner.",
    ),
    "n": (
        "How many to make",
        "n from 8 to 128 at m = 8. In the paper a larger n helps, up to where generating costs more.",
    ),
    "m": ("How many to keep", "m from 32 to 2 at n = 64. In the paper m hardly matters until it is very small."),
    "rules": (
        "Which to keep",
        "8 of 64 by each rule. In the paper max variance is best, random is next, and max reward fails.",
    ),
    "prompts": (
        "Which prompts to make",
        "400 rows, so that a run makes several epochs: prompts without signal are skipped before they are made (GRESO), with "
        "a fixed chance and with one that adapts, or by their past pass rate.",
    ),
    "staleness": (
        "How stale",
        "Rollouts of up to 4 updates ago, with the importance correction and without it. On a CPU generating and training share "
        "the cores, so that overlap gains little time: what shows is what staleness costs at equal steps.",
    ),
    "settling": (
        "Stopping groups that are decided",
        "`selector.settle` stops a group once its selection can gain nothing more.",
    ),
}


def figure_of(name: str) -> Path:
    """The figure of a part, relative to the repository."""
    return Path("docs") / "images" / f"evidence_{'gpu_' if name in GPU_PARTS and name != 'gpu' else ''}{name}.png"


def draw(result: Mapping[str, Any], path: Path, name: str) -> None:
    """The curves of one part, with their bands."""
    place = {arm: at for at, arm in enumerate(THREE)}  # the three arms have the same colours in every figure
    curves = sorted(result["parts"][name]["curves"], key=lambda curve: place.get(curve["label"], 0))
    axes: list[Axis] = list(dict.fromkeys(curve["axis"] for curve in curves))
    panels = [
        (METRIC, [_curve(curve) for curve in curves if curve["axis"] == axis and len(curve["x"]) > 1]) for axis in axes
    ]
    save_comparison(panels, axes, path.parent, name=path.stem, formats=("png",))


def _curve(found: Mapping[str, Any]) -> Curve:
    x, y = (np.array(found[name], dtype=float) for name in ("x", "y"))
    # An interval over two seeds is wider than the figure, and says nothing.
    shown = "low" in found and found["runs"] > 2
    low, high = (np.array(found[name], dtype=float) if shown else y for name in ("low", "high"))
    return Curve(found["label"], x, y, low, high, found["runs"])


def drawn_parts() -> list[str]:
    """The parts that the result file has."""
    return list(json.loads(RESULT.read_text(encoding="utf-8"))["parts"]) if RESULT.is_file() else []


def page(
    result: Mapping[str, Any] | None, gpu: Mapping[str, Any] | None = None, gradients: Mapping[str, Any] | None = None
) -> str:
    """The text of the page from the three result files; None: it was not run."""
    return "\n".join(_lines(result, gpu, gradients)) + "\n"


def _lines(
    result: Mapping[str, Any] | None, gpu: Mapping[str, Any] | None, gradients: Mapping[str, Any] | None
) -> Iterator[str]:
    yield "# What the selection is worth"
    yield ""
    yield (
        "Made by `python -m benchmarks.evidence_page` from `evidence_cpu.json`, `evidence_h200.json` "
        "and `gradient_noise.json` in "
        "`benchmarks/results/`; do not edit."
        if result
        else ("Made by `python -m benchmarks.evidence_page`; do not edit.")
    )
    yield ""
    yield from _how(result)
    yield from reach_lines(result, gpu)
    yield from claim_lines(result)
    for name, (title, about) in QUESTIONS.items():
        yield f"## {title}"
        yield ""
        yield about
        yield ""
        if result is None or name not in result["parts"]:
            yield f"**Not run yet.** `python -m benchmarks.evidence --parts {name}`"
            yield ""
        else:
            yield from _part(result, name)
        if name == "arms":
            yield from gpu_lines(gpu, lambda part: _part(gpu or {}, part))
            yield from gradient_lines(gradients)
    yield from paced_lines(result)
    yield "## Not run yet"
    yield ""
    missing = [title for name, (title, *_) in GPU_PARTS.items() if gpu is None or name not in gpu["parts"]]
    missing += ["more than two seeds", "runs of hours", "larger models"]
    yield f"- On GPUs: {'; '.join(missing)}."
    if result and "k3-uncorrected" not in result["parts"].get("staleness", {}).get("seeds", {}):
        yield "- On the CPU: staleness 3 without the correction; more than two seeds of staleness."
    yield "- The paper's six settings as they are ([paper.md](paper.md))."


def _how(result: Mapping[str, Any] | None) -> Iterator[str]:
    yield (
        "The task is the quickstart's, two-digit addition, with a model of a million parameters that adds seldom. Training, "
        "engine, selection and learner are the real ones. [experiments.md](experiments.md) says how times and intervals are "
        "computed."
    )
    yield ""
    if result is None:
        return
    machine, start = result["machine"], result["start"]
    yield f"- **Command**: `{result['command']}`"
    if result.get("days"):
        yield f"- **Days**: {result['days']}."
    yield (
        f"- **Machine**: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, load "
        f"{machine['load_1min']:g} before; torch {machine['packages']['torch']}, DeepSpeed {machine['packages']['deepspeed']}; "
        f"`--parallel {result['parallel']}`."
    )
    yield (
        f"- **Start**: {start['greedy']:.1%} of {start['rows']} held-out sums right before RL, {start['sampled']:.1%} when "
        f"sampled. Each run has {result['seconds']:g} s of training, evaluations and checkpoints not counted."
    )
    if quick := result.get("quick"):
        yield (f"- **Quick**: {_quick(quick)}. The curves of this page are not those of that.")
    yield (
        "- **Sooner** is how many times sooner an arm's mean curve reaches "
        + (f"{result['target']:.1%}, named before, " if result["target"] else "99 % of the baseline's best ")
        + "than the baseline's does, with a 95 % bootstrap interval over seeds in brackets; below 1 it is later. "
        "`>` and `<` bound it where only one of the two came there."
    )
    yield (
        "- **Accuracy at the end** is the mean over seeds with its 95 % t-interval; of two seeds both are shown, and of one the "
        "interval of the held-out rows."
    )
    yield "- **Clocks**: the same runs, their steps timed by what they made and trained at rates that were measured on GPUs:"
    for clock in result["clocks"]:
        yield f"  - `{clock['name']}`: {clock['about']}."
    yield ""


def _quick(quick: Mapping[str, Any]) -> str:
    where = f"on {quick['cores']} cores of {quick['cpu']}"
    what = f"{quick['runs']} runs of {quick['seconds']:g} s, {quick['parallel']} at a time, and the making of the model"
    if quick["rounds"] == quick["all_rounds"]:
        return f"`python -m benchmarks.evidence --quick` took {quick['minutes']:.0f} minutes {where}: {what}"
    whole = quick["minutes"] * quick["all_rounds"] / quick["rounds"]
    return (
        f"of `python -m benchmarks.evidence --quick` ({what}) {quick['rounds']} of {quick['all_rounds']} rounds took "
        f"{quick['minutes']:.0f} minutes {where}, until the machine's time was over; at that pace the whole takes {whole:.0f}"
    )


def _part(result: Mapping[str, Any], name: str) -> Iterator[str]:
    part = result["parts"][name]
    results = records(part["results"])
    by_axis = {(row["arm"], row["axis"]): row for row in records(part["rows"])}
    clocks = {clock: {row["arm"]: row for row in records(rows)} for clock, rows in part["clocks"].items()}
    ends = {(curve["label"], curve["axis"]): curve["x"][-1] for curve in part["curves"]}
    if part.get("seconds") not in (None, result.get("seconds")):
        yield f"Each run here has {part['seconds']:g} s of training."
        yield ""
    yield f"![accuracy by arm](images/{figure_of(name).name})"
    yield ""
    head = ["arm", "seeds", "accuracy at the end", "best", "sooner, own seconds", "sooner in steps"]
    yield "| " + " | ".join([*head, *(f"sooner, `{clock}`" for clock in clocks), "difference, same steps"]) + " |"
    yield "|" + "---|" * (len(head) + len(clocks) + 1)
    for row in results:
        arm = row["arm"]
        base = arm == part["baseline"]
        cells = [
            f"{arm}{' (baseline)' if base else ''}",
            str(row["seeds"]),
            _accuracy(row),
            f"{row['best']:.1%}",
        ]
        told = [
            _sooner(by_axis.get((arm, axis)), ends.get((arm, axis)), ends.get((part["baseline"], axis)))
            for axis in ("training-minutes", "steps")
        ]
        told += [_sooner(rows.get(arm)) for rows in clocks.values()]
        cells += [""] * len(told) if base else told
        cells.append("" if base else points(by_axis.get((arm, "steps"))))
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from did_not_hold(part, by_axis)
    yield from _explains(part)


def _accuracy(row: Mapping[str, Any]) -> str:
    """The accuracy at the end with its interval; of two seeds both, as their t-interval is wider than all accuracies."""
    value, low, high = row["final"], row["final_low"], row["final_high"]
    if row["seeds"] == 2:
        half = (high - value) / student_t(1)
        return f"{value:.1%} ({value - half:.1%} and {value + half:.1%})"
    return f"{value:.1%}" + (f" [{low:.1%}, {high:.1%}]" if low < high else "")


def _sooner(row: Mapping[str, Any] | None, end: float | None = None, baseline_end: float | None = None) -> str:
    """How many times sooner; where one alone came there, the other's end bounds that, where it is known."""
    if row is None:
        return "–"
    at, baseline_at = row["reaches_at"], row["baseline_reaches_at"]
    if row["speed_up"] is None:
        if at is not None and baseline_at is None:
            return f"> {baseline_end / at:.2f}" if baseline_end and at > 0 else "baseline never"
        if at is None and baseline_at is not None and end:
            return f"< {baseline_at / end:.2f}"
        return "never reached" if at is None else "–"
    if row["speed_up_low"] is None:
        return f"{row['speed_up']:.2f}"
    high = "∞" if row["speed_up_high"] is None else f"{row['speed_up_high']:.2f}"
    return f"{row['speed_up']:.2f} [{row['speed_up_low']:.2f}, {high}]"


def _explains(part: Mapping[str, Any]) -> Iterator[str]:
    rows = records(part["explains"])
    columns = [("grad_norm", "gradient norm", 1.0, ".3f"), ("reward_std", "spread in a group", 1.0, ".3f"),
               ("reward_std/kept", "spread kept", 1.0, ".3f"), ("frac_reward_zero_std", "groups without spread", 100.0, ".0f"),
               ("completions/mean_length", "length", 1.0, ".2f"), ("completions/kept_mean_length", "length kept", 1.0, ".2f"),
               ("timing_s/generate", "generate s", 1.0, ".2f"), ("timing_s/update", "update s", 1.0, ".2f"),
               ("timing_s/publish", "weights s", 1.0, ".2f"), ("timing_s/step", "step s", 1.0, ".2f")]  # fmt: skip
    yield "Means over the runs' steps:"
    yield ""
    yield "| arm | " + " | ".join(title + (" %" if factor == 100 else "") for _, title, factor, _ in columns) + " |"
    yield "|" + "---|" * (len(columns) + 1)
    for row in rows:
        cells = ["–" if row[name] is None else format(factor * row[name], form) for name, _, factor, form in columns]
        yield f"| {row['arm']} | " + " | ".join(cells) + " |"
    yield ""


def main() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else None
    gpu, gradients = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None for path in (GPU_RESULT, GRADIENTS)
    )
    for found in (result, gpu):
        for name in found["parts"] if found else ():
            draw(found or {}, ROOT / figure_of(name), name)
    PAGE.write_text(page(result, gpu, gradients), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
