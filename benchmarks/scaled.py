"""What live scaling did to a run that was scaled by hand, from its folder: rates of each size, and what each change cost.

    pods train RUN.yaml & pods scale RUN_DIR --generators 3 …
    python -m benchmarks.scaled RUN_DIR --sizes 1+1,3+1,2+1 --steps 8 --engine "vLLM, a third of a card each" \\
        --out benchmarks/results/scaling_x.json --figure docs/images/scaling_x.png

The same table and figure as `benchmarks.scaling`, which drives a run on the CPU itself. The first step, in which engines and
kernels warm up, and those in which a pool changed are left out of every phase; sizes without a settled step have none.
`--machine` names the one that the run was on, where it was another.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from benchmarks.scaling import SERIES, draw, effects, phase
from pods_cluster.telemetry.run_folder import RunFolder

KEYS = (*SERIES, "timing_s/publish", "generator/saturated_tokens_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sizes", required=True, help="generators+learners of each phase, in order")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a phase, at most")
    parser.add_argument("--engine", default="", help="words for the result")
    parser.add_argument("--machine", help="where the run was, if not here")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    arguments = parser.parse_args()
    folder = RunFolder.open(arguments.run)
    records = [record for record in folder.read_metrics() if record["step"] > 1]
    pairs = (pair.partition("+") for pair in arguments.sizes.split(","))
    sizes = [(int(generators), int(learners)) for generators, _, learners in pairs]
    asked = [event for event in folder.read_events() if event["kind"] == "scaling"]
    changes = [
        {"to": list(after), "asked": event["time"], "asked_at_step": event["step"]}
        for event, after in zip(asked, sizes[1:], strict=True)
    ]
    settled = {(r["generator/workers"], r["learner/workers"]) for r in records if not r["generator/leaving"]}
    phases = [phase(records, pair, arguments.steps) for pair in sizes if pair in settled]
    result: dict[str, Any] = {
        "machine": arguments.machine or machine(),
        "engine": arguments.engine,
        "phases": phases,
        "tokens_per_second_by_first": [
            round(row["tokens_per_second"] / phases[0]["tokens_per_second"], 3) for row in phases
        ],
        "changes": effects(records, changes),
        "steps": table(records, KEYS),
    }
    write_result(arguments.out, result)
    draw(records, arguments.figure, f"One run while its pools change ({arguments.engine})")
    for row in phases:
        print(row)
    print(result["tokens_per_second_by_first"], result["changes"])


if __name__ == "__main__":
    main()
