"""The three arms on GPUs, from the folder of a sweep that has run: curves, time to the target, and what explains them.

    pods sweep configs/sweeps/math-1gpu.yaml …        # seed 1 on one card, seed 2 on another
    python -m benchmarks.evidence_gpu RUNS/math-three-arms-1gpu --part math --about "…" --machine RESULT.json

The runs' machine is read from a result that was measured on it (`--machine`), as the runs' folders may have been carried away.
Writes one part of `benchmarks/results/evidence_h200.json`; `python -m benchmarks.evidence_page` shows it in docs/evidence.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from benchmarks.evidence_answers import AXES, answer
from benchmarks.evidence_sections import GPU_PARTS
from pods_cluster.client.compare_command import read_arms, target_of
from pods_cluster.telemetry.arm_comparison import compare
from pods_cluster.telemetry.speedup import Ratio, Target

ROOT = Path(__file__).parents[1]


def _ratio(found: Ratio) -> dict[str, Any]:
    return {"target": found.target, "speed_up": found.value, "low": found.low, "high": found.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--part", required=True, choices=list(GPU_PARTS))
    parser.add_argument("--about", required=True, help="the commands, and how the runs shared the machine")
    parser.add_argument(
        "--also", metavar="METRIC", help="another metric of the evaluations that is told beside the accuracy"
    )
    parser.add_argument("--note", help="what the part shows and what it does not")
    parser.add_argument("--machine", type=Path, help="a result file of the machine; left out: this one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "evidence_h200.json")
    arguments = parser.parse_args()
    arms, given = read_arms([str(arguments.sweep)])
    made_on = json.loads(arguments.machine.read_text(encoding="utf-8"))["machine"] if arguments.machine else machine()
    result = {"benchmark": "evidence_gpu", "runs": {}, "parts": {}}
    if arguments.out.is_file():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    result["runs"][arguments.part] = {
        "machine": made_on,
        "command": arguments.about,
        "target": given["target"],
        "gain": given.get("gain"),
        "note": arguments.note,
    }
    result["parts"][arguments.part] = answer(arms, given["baseline"], target_of(given), by_steps=True)
    if arguments.also:
        found = compare(arms, baseline=given["baseline"], metric=arguments.also, target=Target(), axes=AXES[:1])
        rows = [
            {"arm": arm.label, "first": arm.first, "final": arm.final} | _ratio(arm.axes[AXES[0]].ratio)
            for arm in found.arms
        ]
        result["parts"][arguments.part]["also"] = {"metric": arguments.also, "rows": table(rows, list(rows[0]))}
    write_result(arguments.out, result)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
