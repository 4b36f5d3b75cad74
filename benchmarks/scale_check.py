"""The model of `scale.py` beside runs that were measured: seconds of a step, modelled from the times of their stages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale_inputs import EngineSpeed, Parts, Workload, lognormal, uniform
from benchmarks.scale_model import simulate

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.15
N, M = 64, 16
LENGTHS = lognormal(300, 0.4, 512)
"""GSM8K at 0.5B: 256 to 302 tokens a rollout in the measured runs, cut at 512."""


def check() -> list[dict[str, Any]]:
    """Each measured run beside its model; `within` says whether they differ by less than 15 %."""
    rows = []
    for run, measured, work, engine, parts in [*_paced_runs(), *_vllm_runs()]:
        outcome = simulate(work, engine, parts)
        error = outcome.seconds_per_step / measured - 1
        rows.append({"run": run, "measured": round(measured, 3), "modelled": round(outcome.seconds_per_step, 3),
                     "error": round(error, 3), "within": abs(error) <= TOLERANCE})  # fmt: skip
        print(
            f"{run:62} measured {measured:7.3f} s, modelled {outcome.seconds_per_step:7.3f} s, {error:+.1%}", flush=True
        )
    return rows


def read_result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


Case = tuple[str, float, Workload, EngineSpeed, Parts]


def fixed(seconds: float) -> Callable[[int, float], float]:
    return lambda rollouts, tokens: seconds  # noqa: ARG005


def _paced_runs() -> list[Case]:
    """Runs of the whole service with engines and learners that keep time: everything about them is known."""
    cases: list[Case] = []
    overlap, wide = read_result("overlap"), uniform(1, 128)
    engine = EngineSpeed(0.0, 1 / 4000, 256)
    for row in overlap["overlap"]:
        work = Workload(generators=2, prompts=8, n=32, m=8, staleness=row["staleness"], lengths=wide)
        parts = Parts(update=fixed(row["balanced_seconds"]), publish=0.05)
        cases.append((f"overlap, staleness {row['staleness']}", 1 / row["steps_per_second"], work, engine, parts))
    for row in overlap["generators"]:
        work = Workload(generators=row["generators"], prompts=8, n=32, m=8, staleness=1, lengths=wide)
        parts = Parts(update=fixed(1 / row["learner_bound_steps_per_second"] - 0.05), publish=0.05)
        cases.append((f"overlap, {row['generators']} generators", 1 / row["steps_per_second"], work, engine, parts))
    drained = read_result("continuous")
    settings = drained["settings"]
    engine = EngineSpeed(
        0.0, 1 / settings["tokens_per_second"], settings["places"], 1 / settings["rollout_tokens_per_second"]
    )
    for row in drained["rows"]:
        if row["issue"] == "continuous" and not row["evaluation"]:
            work = Workload(generators=2, prompts=8, n=16, m=4, staleness=row["staleness"], lengths=wide)
            parts = Parts(update=fixed(settings["update_seconds"]), publish=0.05)
            name = f"continuous, batches that drain, staleness {row['staleness']}"
            cases.append((name, 1 / row["steps_per_second"], work, engine, parts))
    for phase in read_result("scaling")["phases"]:
        work = Workload(generators=phase["generators"], prompts=12, n=16, m=4, staleness=1, lengths=uniform(16, 48))
        parts = Parts(update=fixed(phase["update_seconds_median"]), publish=phase["publish_seconds_median"])
        steps = phase["steps"][1] - phase["steps"][0] + 1
        name = f"scaling, {phase['generators']} + {phase['learners']}, real learner ranks"
        cases.append((name, phase["seconds"] / steps, work, EngineSpeed(0.0, 1 / 1500, 256), parts))
    return cases


SHARED_BASE = 0.003
"""Seconds of an engine step of 0.5B without rollouts, where three share an H200: fitted to one run, `sync`, alone."""


def _vllm_runs() -> list[Case]:
    """GSM8K at 0.5B on H200s. Of three engines on a card each kept up a third of 75,671 tokens/s (scaling_h200.json) with
    the 341 rollouts that it could have."""
    three = EngineSpeed(SHARED_BASE, (341 / (75671 / 3) - SHARED_BASE) / 341, 512)
    one = EngineSpeed(0.008, 14e-6, 1024)  # docs/gsm8k-gpu.md
    pause = statistics.median(item["longest_gap_seconds"] for item in read_result("weights_3b_h200")["pauses"])
    cases: list[Case] = []

    def add(name: str, measured: float, engine: EngineSpeed, generators: int, prompts: int, staleness: int,
            mean: float, no_signal: float, update: float, publish: float) -> None:  # fmt: skip
        work = Workload(generators=generators, prompts=prompts, n=N, m=M, staleness=staleness,
                        lengths=lognormal(mean, 0.4, 512), no_signal=no_signal, steps=40)  # fmt: skip
        cases.append((name, measured, work, engine, Parts(update=fixed(update), publish=publish, pause=pause)))

    for arm in read_result("arms_h200")["arms"]:
        if arm["arm"] in ("sync", "k1", "k2"):
            means, fates = arm["means"], arm["fates"]
            share = fates["no_signal"] / (fates["no_signal"] + fates["trained"])
            add(f"arms on H200, {arm['arm']}" + (" (fitted)" if arm["arm"] == "sync" else ""),
                1 / arm["steps_per_second"], three, 3, 8, {"sync": 0, "k1": 1, "k2": 2}[arm["arm"]],
                means["completions/mean_length"], share, means["timing_s/update"] + means["timing_s/fetch"],
                means["timing_s/publish"])  # fmt: skip
    for phase in read_result("scaling_h200")["phases"]:
        steps = phase["steps"][1] - phase["steps"][0] + 1
        mean = phase["tokens_per_second"] / phase["rollouts_per_second"]
        share = 1 - phase["trained_per_second"] * N / M / phase["rollouts_per_second"]
        alone = EngineSpeed(one.base, (512 / 27211 - one.base) / 512, 512)  # its best rate, in the same file
        engine = alone if phase["generators"] == 1 else three
        add(f"scaling on H200, {phase['generators']} engine(s)", phase["seconds"] / steps, engine,
            phase["generators"], 8, 1, mean, max(share, 0.0), phase["update_seconds_median"],
            phase["publish_seconds_median"])  # fmt: skip
    for file in ("gsm8k_0.5b_h200_shared", "gsm8k_0.5b_h200"):
        for run in read_result(file)["runs"]:
            if file.endswith("shared") and run["run"].startswith("LoRA"):
                continue  # it is in the other file too
            config, stage, made = run["config"], run["seconds_per_step"], run["summary"]["rollouts"]["generated"]
            workers, steps = config["generator"]["workers"], run["summary"]["steps"]
            add(f"GSM8K on H200, {run['run']}", stage["step"], three if workers == 3 else one, workers, 16,
                config["staleness"], run["summary"]["tokens"]["sampled"] / made, 1 - steps * 16 * N / made,
                stage["update"] + stage["fetch"], stage["publish"])  # fmt: skip
    return cases
