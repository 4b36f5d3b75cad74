"""Sections of docs/evidence.md: the arms on GPUs (`evidence_h200.json`), their gradients (`gradient_noise.json`),
and the check of the clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks._result_file import records

GPU_PARTS = {
    "gpu": (
        "GSM8K, one card",
        "learner and engines on one card, n = 64 and m = 16, staleness 1, greedy accuracy on all 1,319 test rows",
        "pods sweep configs/sweeps/gsm8k-1gpu.yaml",
    ),
    "two": (
        "GSM8K, two cards",
        "engines on one card and the learner on the other, n = 64 and m = 16, staleness 2, greedy accuracy on all 1,319 "
        "test rows before, at fixed times of training, and after",
        "pods sweep configs/sweeps/gsm8k-2gpu.yaml",
    ),
    "gpu-settling": (
        "GSM8K, one card, groups stopped early",
        "learner and three engines on one card, n = 64, m = 16 and 8, staleness 2 (4 with waves), greedy accuracy on all 1,319 "
        "test rows before, after each 28 s of training, and after",
        "pods sweep configs/sweeps/gsm8k-1gpu-settling.yaml",
    ),
    "gpu-kept": (
        "GSM8K, one card, caches kept over new weights",
        "learner and two engines on one card, n = 64 and m = 16, staleness 2, `weights.keep_cache`, greedy accuracy on all 1,319 "
        "test rows before, at fixed times of training, and after",
        "pods sweep configs/sweeps/gsm8k-1gpu-kept.yaml",
    ),
    "math": (
        "MATH, one card",
        "4,500 problems of MATH to train on and 500 held out, learner and engines on one card, n = 64 and m = 16, staleness 1, "
        "greedy accuracy on all held-out rows before, after each 45 s of training, and after",
        "pods sweep configs/sweeps/math-1gpu.yaml",
    ),
    "math-two": (
        "MATH, two cards",
        "4,500 problems of MATH to train on and 500 held out, engines on one card and the learner on the other, n = 64 and "
        "m = 16, staleness 2, greedy accuracy on all held-out rows before, at fixed times of training, and after",
        "pods sweep configs/sweeps/math-2gpu.yaml",
    ),
    "lora": (
        "GSM8K, one card, adapters",
        "adapters of rank 64 on all linear layers, as in the paper's settings a to d, else as on one card above",
        "pods sweep configs/sweeps/gsm8k-1gpu-lora.yaml",
    ),
    "zero2": (
        "GSM8K, two cards, two ranks of ZeRO-2",
        "full fine-tuning by two ranks, as in the paper's settings e and f; a rank and two engines on each card",
        "pods sweep configs/sweeps/gsm8k-2gpu-zero2.yaml",
    ),
}
"""Parts of `evidence_h200.json`: title, what runs, and the command."""
STAGES = {"timing_s/step": "the whole", "timing_s/update": "update", "timing_s/generate": "wait for rollouts"}


def gpu_lines(result: Mapping[str, Any] | None, tables: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """The sections of the arms on GPUs; `result` None: nothing was run. `tables` gives the tables of a part."""
    yield "## Three arms on GPUs"
    yield ""
    yield "Qwen2.5-Coder-0.5B. What counts as reached was written into each sweep's file before its runs."
    yield ""
    for name, (title, what, command) in GPU_PARTS.items():
        yield f"### {title}"
        yield ""
        yield f"{what[0].upper()}{what[1:]}."
        yield ""
        if result is None or name not in result["parts"]:
            yield f"**Not run yet.** `{command}`, then `python -m benchmarks.evidence_gpu`"
            yield ""
            continue
        runs, part = result["runs"][name], result["parts"][name]
        yield f"- **Runs**: {runs['command']}"
        yield f"- **Machine**: {', '.join(runs['machine']['gpus'])}, {runs['machine']['cpu']}."
        goal = f"{runs['target']:.0%}" if runs["gain"] is None else f"{100 * runs['gain']:.0f} points above the start"
        seeds = max(len(seeds) for seeds in part["seeds"].values())
        interval = "one seed, so without an interval" if seeds < 2 else f"the interval over {seeds} seeds is too narrow"
        yield f"- **Sooner**: to {goal}; {interval}."
        yield from _cause(part)
        yield from _bound(part)
        if runs.get("note"):
            yield f"- **What it shows**: {runs['note']}"
        yield ""
        yield from tables(name)
        yield from _also(part)
    if result is not None and "gpu" in result["parts"]:
        yield (
            "At this size answers cost more than updates with m = 16, and the selection saves updates. Where an update is dearer "
            "beside an answer it saves more: the columns `3b` above are what the clocks tell of that, within wide intervals."
        )
        yield ""


def _also(part: Mapping[str, Any]) -> Iterator[str]:
    """Another metric than the accuracy, where the part has one; its target is a share of the baseline's best."""
    if "also" not in part:
        return
    rows = records(part["also"]["rows"])
    about = "sooner to 99 % of the baseline's best, which was not named before the runs"
    yield f"What was learned beside it, `{part['also']['metric']}`; {about}:"
    yield ""
    yield "| arm | before | at the end | sooner, own seconds |"
    yield "|---|---|---|---|"
    for row in rows:
        base = row["arm"] == part["baseline"]
        sooner = "" if base else "never reached" if row["speed_up"] is None else f"{row['speed_up']:.2f}"
        if not base and row["speed_up"] is not None and row["low"] is not None and row["high"] is not None:
            sooner += f" [{row['low']:.2f}, {row['high']:.2f}]"
        yield f"| {row['arm']}{' (baseline)' if base else ''} | {row['first']:.1%} | {row['final']:.1%} | {sooner} |"
    yield ""


def _cause(part: Mapping[str, Any]) -> Iterator[str]:
    """What a time to the target is made of: the seconds of a step, and the steps."""
    means = {row["arm"]: row for row in records(part["explains"])}
    steps = {row["arm"]: row for row in records(part["rows"]) if row["axis"] == "steps"}
    base = means.get(part["baseline"])
    for arm, row in means.items():
        if base is None or arm == part["baseline"]:
            continue
        share = row["timing_s/step"] / base["timing_s/step"]
        beside = ", ".join(f"{what} {row[name]:.2f} s beside {base[name]:.2f}" for name, what in STAGES.items())
        text = f"- **{arm}**: a step takes {share:.2f} of {part['baseline']}'s time ({beside})"
        found = steps.get(arm)
        if found is not None and found["speed_up"] is not None:
            text += f", and it needs {1 / found['speed_up']:.2f} times as many of them"
        yield text + "."


def _bound(part: Mapping[str, Any]) -> Iterator[str]:
    """What keeps grpo-pods from being sooner still: the share of its step in which it waits for rollouts."""
    means = {row["arm"]: row for row in records(part["explains"])}
    pods, few = means.get("grpo-pods"), means.get("grpo")
    if pods is None:
        return
    share = pods["timing_s/generate"] / pods["timing_s/step"]
    text = f"- **What bounds it**: grpo-pods waits for rollouts in {share:.0%} of its time, which no cheaper update takes away"
    if few is not None:
        text += (
            f"; grpo makes m in place of n and steps {pods['timing_s/step'] / few['timing_s/step']:.1f} times as often"
        )
    yield text + "."


def gradient_lines(result: Mapping[str, Any] | None) -> Iterator[str]:
    """The section on gradients; `result` None: not run."""
    yield "## What one update is worth"
    yield ""
    yield (
        "The same batches for every arm, at fixed weights: how much of its gradient is signal. Signal-to-noise is "
        "|G|² / E|g − G|², with g the gradient of a batch and G its expectation; the cosine is between "
        "the expectations of the arm "
        "and of all n rollouts (grpo-ga); progress is what a step of the same length gains in that direction."
    )
    yield ""
    if result is None:
        yield "**Not run yet.** `python -m benchmarks.gradient_noise`"
        yield ""
        return
    yield (
        f"`python -m benchmarks.gradient_noise`, {result['batches']} batches of {result['prompts']} prompts; intervals are 95 % "
        "bootstrap ones over batches."
    )
    yield ""
    for model in result["models"]:
        yield f"{model['about']}:"
        yield ""
        yield "| arm | trained a batch | signal-to-noise | cosine with all | progress | groups without signal |"
        yield "|---|---|---|---|---|---|"
        for row in records(model["arms"]):
            yield (
                f"| {row['arm']} | {row['trained']:.0f} | {_band(row, 'snr', '.3f')} | {_band(row, 'cosine', '.2f')} | "
                f"{_band(row, 'progress', '.2f')} | {row['groups_without_signal']:.0%} |"
            )
        yield ""


def paced_lines(result: Mapping[str, Any] | None) -> Iterator[str]:
    """The section on the check of the clocks; `result` None, or without one: not run."""
    yield "## Whether the clocks are right"
    yield ""
    yield (
        "The real loop, workers and selector with an engine and a learner that keep the clock's rates. What is above the clock's "
        "seconds is the service itself, and the machine."
    )
    yield ""
    if result is None or "paced" not in result:
        yield "**Not run yet.**"
        yield ""
        return
    machine = result["paced_machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']:g} before"
    faster = f"; {result['paced_speed']:g} times as fast as told" if result["paced_speed"] != 1 else ""
    yield f"`python -m benchmarks.evidence_clocks` on {where}{faster}."
    yield ""
    yield "| clock | arm | s a step, paced | s a step, told | above it |"
    yield "|---|---|---|---|---|"
    for row in result["paced"]:
        above = row["seconds"] / row["told"] - 1
        yield f"| `{row['clock']}` | {row['arm']} | {row['seconds']:.2f} | {row['told']:.2f} | {above:+.0%} |"
    yield ""
    for clock in dict.fromkeys(row["clock"] for row in result["paced"]):
        of = {row["arm"]: row for row in result["paced"] if row["clock"] == clock}
        paced, told = (of["grpo-ga"][name] / of["grpo-pods"][name] for name in ("seconds", "told"))
        yield f"- `{clock}`: a step of grpo-ga takes {paced:.2f} times one of grpo-pods; the clock tells {told:.2f}."
    yield ""


def _band(row: Mapping[str, Any], name: str, form: str) -> str:
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "not told"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if low is not None and low < high else f"{value:{form}}"
