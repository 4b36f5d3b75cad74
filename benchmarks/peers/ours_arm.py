"""This project's run for one arm: the command, and the run's folder read back into the rows that all trainers share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.arms import Arm, Settings
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import merge_steps

STAGES = ("wait", "generate", "score", "select", "fetch", "update", "publish", "scale")
CPU = {  # the built-in engine, no card; to try the script out
    "model.dtype": "float32",
    "generator.engine": "transformers",
    "generator.engine_options": {},
    "generator.max_sequences": 64,
    "generator.gpus_per_worker": 0,
    "learner.gpus_per_worker": 0,
    "learner.tokens_per_microbatch": 4096,
}


def command(arm: Arm, settings: Settings, out: Path) -> list[str]:
    """What starts the run; its folder is OUT/<arm>."""
    fields = {
        "model.path": settings.model,
        "data.path": settings.data,
        "data.name": None,
        "data.eval.rows": settings.held_out,
        "generator.rollouts_per_prompt": arm.n,
        "generator.max_tokens": settings.max_tokens,
        "selector.keep": arm.m,
        "staleness": arm.staleness,
        "learner.prompts_per_step": settings.prompts,
        "learner.learning_rate": settings.learning_rate,
        "learner.warmup_steps": settings.warmup_steps,
        "run.name": arm.name,
        "run.dir": str(out),
        "run.steps": 100_000,
        "run.max_seconds": arm.seconds,
        "run.seed": settings.seed,
        "run.eval.every": arm.evaluate,
        "run.eval.samples": 0,
        "run.checkpoint.every": 0,
        "run.samples_every": 0,
        "run.export": False,
    }
    fields |= arm.options
    if settings.device == "cpu":
        fields |= CPU
    start = [sys.executable, "-c", "from pods_cluster.client.cli import main; main()", "train", "--plain", arm.config]
    return start + [f"{name}={json.dumps(value)}" for name, value in fields.items()]


def read(arm: Arm, out: Path) -> dict[str, Any]:
    """The arm's `steps`, `evals` and `end`, as far as they are written."""
    if not (out / arm.name).is_dir():
        return {"steps": [], "evals": [], "end": {}}
    folder = RunFolder.open(out / arm.name)
    records = merge_steps(folder.read_metrics())
    steps, evals, at = [], [], 0.0
    for record in records:
        if seconds := record.get("timing_s/step"):
            # A light copy of the learner's state keeps the run from its steps, and is not part of any.
            seconds += record.get("timing_s/copy", 0.0)
            at += seconds
            steps.append(_row(record, seconds, at))
        if (accuracy := record.get("eval/greedy_accuracy")) is not None:
            evals.append(
                {
                    "step": record["step"],
                    "at": at,
                    "accuracy": accuracy,
                    "seconds": record.get("timing_s/eval"),
                }
            )
    peaks = {
        role: max((record.get(f"memory/{role}/gpu_peak", 0.0) for record in records), default=0.0)
        for role in ("learner", "generator")
    }
    end: dict[str, Any] = {f"{role}_allocated_gb": round(peak / 1e9, 2) for role, peak in peaks.items() if peak}
    end["choices"] = [event["text"] for event in folder.read_events() if event.get("kind") == "learner"]
    return {"steps": steps, "evals": evals, "end": end}


def _row(record: dict[str, Any], seconds: float, at: float) -> dict[str, Any]:
    return {
        "step": record["step"],
        "time": record["time"],
        "seconds": seconds,
        "at": at,
        "stages": {stage: round(value, 4) for stage in STAGES if (value := record.get(f"timing_s/{stage}"))},
        "correct": record.get("rewards/math_answer/mean"),
        "reward": record.get("reward"),
        "tokens_made": record.get("tokens/sampled", 0.0),
        "tokens_trained": record.get("tokens/trained", 0.0),
        "mismatch": record.get("sampling/sampling_logp_difference/mean"),
        "idle": {
            pool: record[f"{pool}/idle_share"] for pool in ("generator", "learner") if f"{pool}/idle_share" in record
        },
        "busy": {
            pool: share
            for pool in ("generator", "learner")
            # above 1 an evaluation is in it, whose seconds are not the step's
            if (share := record.get(f"{pool}/busy_seconds", 2 * seconds) / seconds) <= 1
        },
        "mean_staleness": record.get("staleness/mean"),
        "rollouts_made": record.get("rollouts/generated"),
        "replaced": record.get("groups/replaced"),
    }
