"""What the idle time of both pools consisted of, from runs' folders.

    python -m benchmarks.idle_parts runs/a runs/b --out benchmarks/results/two_cards_x.json

A pool's idle share is 1 - its tokens/s over the best that it kept up in the run. For the generators it is divided exactly: the
shares of the engines' time that went into new weights, into their fingerprints, into waiting for rollouts and between two
steps, and what is left, steps that made fewer tokens than at best: places without a rollout, prompts and, after an update
without `weights.keep_cache`, everything in flight computed anew. The learner's is divided by the stages of the step. The first
`--warm` steps are left out. It computes nothing on a card: the file has the machine's description from `--machine`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._result_file import table, write_result
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import merge_steps

OUTSIDE = ("weights", "verifying", "empty", "between")
"""Parts of the time of an engine's thread in which it makes no step."""
COLUMNS = (
    "step", "timing_s/step", "timing_s/generate", "timing_s/fetch", "timing_s/update", "timing_s/publish",
    "generator/idle_share", "learner/idle_share", "generator/tokens_per_second", "generator/busy_seconds",
    *(f"generator/{part}_seconds" for part in OUTSIDE), "generator/mean_running", "generator/waiting",
    "tokens/recomputed", "weights/staged", "weights/staging_seconds", "staleness/mean",
    "sampling/sampling_logp_difference/mean",
)  # fmt: skip
MEANS = (
    "timing_s/step", "timing_s/generate", "timing_s/fetch", "timing_s/update", "timing_s/publish", "weights/staging_seconds",
    "generator/mean_running", "generator/waiting", "tokens/recomputed", "staleness/mean", "rollouts/generated",
    "rollouts/trained", "sampling/sampling_logp_difference/mean",
)  # fmt: skip
Record = Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--warm", type=int, default=2, help="steps at the start that are left out")
    parser.add_argument("--machine", type=Path, help="a result file that was written on the machine of the runs")
    parser.add_argument("--command", default="", help="how the runs were started, for the file")
    parser.add_argument("--out", type=Path, help="else the means are printed alone")
    options = parser.parse_args()
    found = []
    for path in options.runs:
        steps = [step for step in merge_steps(RunFolder.open(path).read_metrics()) if step.get("timing_s/step")]
        found.append({"run": path.name, "steps": len(steps), **summary(steps[options.warm :])})
        print(json.dumps(found[-1], indent=1), flush=True)
        found[-1]["rows"] = table(steps, COLUMNS)
    if options.out:
        machine = json.loads(options.machine.read_text(encoding="utf-8"))["machine"] if options.machine else None
        write_result(options.out, {"machine": machine, "command": options.command, "warm": options.warm, "runs": found})


def summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Means of the steps, and both pools' idle shares in their parts; empty without steps."""
    if not steps:
        return {}
    return {
        "generator": generator_parts(steps),
        "learner": learner_parts(steps),
        "means": {name: _sum(steps, name) / len(steps) for name in MEANS if any(name in step for step in steps)},
    }


def generator_parts(steps: Sequence[Record]) -> dict[str, float]:
    """`idle` of the generators over `steps`, and its parts, which add up to it."""
    busy = _sum(steps, "generator/busy_seconds")
    outside = {part: _sum(steps, f"generator/{part}_seconds") for part in OUTSIDE}
    seconds = busy + sum(outside.values())
    spans = [sum(step.get(f"generator/{part}_seconds", 0.0) for part in ("busy", *OUTSIDE)) for step in steps]
    tokens = sum(step["generator/tokens_per_second"] * span for step, span in zip(steps, spans, strict=True))
    best = max(step["generator/saturated_tokens_per_second"] for step in steps)
    parts = {part: value / seconds for part, value in outside.items()}
    return {
        "idle": 1.0 - tokens / seconds / best,
        **parts,
        "slower_steps": busy / seconds - tokens / seconds / best,
        "tokens_per_second": tokens / seconds,
        "best_tokens_per_second": best,
    }


def learner_parts(steps: Sequence[Record]) -> dict[str, float]:
    """`idle` of the learner over `steps`, and the shares of the stages in which it does not update."""
    seconds = _sum(steps, "timing_s/step")
    best = max(step["learner/saturated_tokens_per_second"] for step in steps)
    found = {"idle": 1.0 - _sum(steps, "tokens/trained") / seconds / best}
    for stage in ("generate", "fetch", "publish"):
        found[stage] = _sum(steps, f"timing_s/{stage}") / seconds
    found["slower_updates"] = found["idle"] - sum(found[stage] for stage in ("generate", "fetch", "publish"))
    return found


def _sum(steps: Sequence[Record], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps)


if __name__ == "__main__":
    main()
