"""What the service itself costs of a quickstart step: all that is neither engine nor learner computing.

    make quickstart; python -m benchmarks.overhead [--steps 40]

Runs the quickstart's own configuration with its cached model. What is not overhead: the time in which the worker has rollouts
in its engine or at its scorers, the rank's seconds of training, and the transfer of the weights. The rest of a step is the
controller, the selector, Ray, and the way of rollouts to the learner. (`engine` is the part of `worker` in which the engine
computes; the others are taking requests in, detokenising, and scoring the last rollouts.) With staleness 0 the stages take
turns, so nothing overlaps. The first steps are left out. Writes `benchmarks/results/overhead.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.client.demo import CONFIG
from pods_cluster.telemetry.run_folder import RunFolder

RESULT = Path(__file__).parent / "results" / "overhead.json"
TARGET = 0.10
SKIP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="key=value, as in model.path=…")
    arguments = parser.parse_args()
    on = machine()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pods_cluster.client.cli",
            "train",
            "--plain",
            str(CONFIG),
            *arguments.overrides,
        ]
        command += [f"run.dir={folder}", "run.name=overhead", f"run.steps={arguments.steps}", "run.eval.every=0"]
        command += ["run.checkpoint.every=0", "run.export=false", "data.eval=null"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        steps = [r for r in RunFolder.open(Path(folder) / "overhead").read_metrics() if "timing_s/step" in r][SKIP:]
    parts = {
        "worker": "generator/occupied_seconds",
        "engine": "generator/busy_seconds",
        "learner": "learner/busy_seconds",
        "publish": "timing_s/publish",
        "fetch": "timing_s/fetch",
        "step": "timing_s/step",
    }
    seconds = {name: statistics.fmean(step[metric] for step in steps) for name, metric in parts.items()}
    shares = [
        1 - (step[parts["worker"]] + step[parts["learner"]] + step[parts["publish"]]) / step["timing_s/step"]
        for step in steps
    ]
    result = {
        "machine": on,
        "steps": len(steps),
        "mean_seconds": {name: round(value, 4) for name, value in seconds.items()},
        "overhead_share_median": round(statistics.median(shares), 4),
        "overhead_share_mean": round(statistics.fmean(shares), 4),
        "target": TARGET,
    }
    write_result(RESULT, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
