"""The model of `scale.py` beside runs that were measured: seconds of a step, modelled from the times of their stages."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._result_file import records
from benchmarks.scale_inputs import EngineSpeed, Parts, Workload, lognormal, uniform
from benchmarks.scale_model import simulate

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.15
N, M = 64, 16
SEEDS = 5
"""Times that a run is modelled: its lengths are drawn, and a run of ten steps is one draw of many."""
PROMPT_TOKENS = 100
"""GSM8K's, with the chat template: 94 to 104 a step in runs on H200s."""
LENGTHS = lognormal(300, 0.4, 512)
"""GSM8K at 0.5B: 256 to 302 tokens a rollout in the measured runs, cut at 512."""


def check() -> list[dict[str, Any]]:
    """Each measured run beside its model; `within` says whether they differ by less than 15 %. Where the engine's speed is
    not of the run itself, `fastest` and `slowest` are the model's seconds at the ends of what was measured of such engines."""
    rows = []
    for case in [*_paced_runs(), *_vllm_runs()]:
        found = [_seconds(case, case.engine, seed) for seed in range(SEEDS)]
        modelled, spread = statistics.mean(found), statistics.stdev(found)
        error = modelled / case.measured - 1
        row = {"run": case.run, "measured": round(case.measured, 3), "modelled": round(modelled, 3),
               "spread": round(spread, 3), "error": round(error, 3), "within": abs(error) <= TOLERANCE}  # fmt: skip
        for name, engine in zip(("fastest", "slowest"), case.ends, strict=False):
            row[name] = round(statistics.mean(_seconds(case, engine, seed) for seed in range(2)), 3)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Case:
    """A run that was measured, and the model's inputs for it."""

    run: str
    measured: float
    work: Workload
    engine: EngineSpeed
    parts: Parts
    ends: tuple[EngineSpeed, ...] = ()
    """The fastest and the slowest of such engines that were measured, where this run's own was not."""


def _seconds(case: Case, engine: EngineSpeed, seed: int) -> float:
    return simulate(replace(case.work, seed=seed), engine, case.parts).seconds_per_step


def read_result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def fixed(seconds: float) -> Callable[[int, float], float]:
    return lambda rollouts, tokens: seconds  # noqa: ARG005


def _paced_runs() -> list[Case]:
    """Runs of the whole service with engines and learners that keep time: everything about them is known."""
    cases: list[Case] = []
    overlap, wide = read_result("overlap"), uniform(1, 128)
    engine = EngineSpeed(0.0, 1 / 4000, 256)
    for row in overlap["overlap"]:
        work = Workload(generators=2, prompts=8, n=32, m=8, staleness=row["staleness"], lengths=wide, batches=True)
        parts = Parts(update=fixed(row["balanced_seconds"]), publish=0.05)
        cases.append(Case(f"overlap, staleness {row['staleness']}", 1 / row["steps_per_second"], work, engine, parts))
    for row in overlap["generators"]:
        work = Workload(generators=row["generators"], prompts=8, n=32, m=8, staleness=1, lengths=wide)
        stage = row["stage_seconds"]
        parts = Parts(update=fixed(stage["update"] + stage["fetch"]), publish=stage["publish"])
        cases.append(Case(f"overlap, {row['generators']} generators", 1 / row["steps_per_second"], work, engine, parts))
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
            cases.append(Case(name, 1 / row["steps_per_second"], work, engine, parts))
    for phase in read_result("scaling")["phases"]:
        work = Workload(generators=phase["generators"], prompts=12, n=16, m=4, staleness=1, lengths=uniform(16, 48))
        parts = Parts(update=fixed(phase["update_seconds_median"]), publish=phase["publish_seconds_median"])
        steps = phase["steps"][1] - phase["steps"][0] + 1
        name = f"scaling, {phase['generators']} + {phase['learners']}, real learner ranks"
        cases.append(Case(name, phase["seconds"] / steps, work, EngineSpeed(0.0, 1 / 1500, 256), parts))
    return cases


SHARED_BASE = 0.003
"""Seconds of an engine step of 0.5B without rollouts, where three share an H200: fitted to one run, `sync`, alone."""
SHARE = 0.2
"""Share of its speed that an engine keeps while the learner on its card updates: fitted to one run, `grpo-ga`, alone."""
FIRST = 3
"""First steps of a run that are left out, as those of the model are: the engines' start is in them."""


def _vllm_runs() -> list[Case]:
    """GSM8K at 0.5B on H200s. Of three engines on a card each kept up a third of 75,671 tokens/s (scaling_h200.json) with
    the 341 rollouts that it could have."""
    three = EngineSpeed(SHARED_BASE, (341 / (75671 / 3) - SHARED_BASE) / 341, 512)
    one = EngineSpeed(0.008, 14e-6, 1024)  # docs/gsm8k-gpu.md
    rates = [rate for row in engine_rows("0.5b") if row.get("arm") == "core-vllm-scheduler" for rate in row["rates"]]
    ends = tuple(EngineSpeed(one.base * slower, one.per_rollout * slower, one.slots)
                 for slower in (one.full_rate / max(rates), one.full_rate / min(rates)))  # fmt: skip
    pause = statistics.median(item["longest_gap_seconds"] for item in read_result("weights_3b_h200")["pauses"])
    cases: list[Case] = []

    def add(name: str, measured: float, engine: EngineSpeed, update: float, publish: float, *, mean: float,
            prompts: int = 8, ends: tuple[EngineSpeed, ...] = (), **run: Any) -> None:  # fmt: skip
        work = Workload(prompts=prompts, n=N, m=M, lengths=lognormal(mean, 0.4, 512), steps=40, batches=True,
                        prompt_tokens=PROMPT_TOKENS, **run)  # fmt: skip
        recompute = compute_bound("0.5b") / run["generators"]  # they are on one card
        parts = Parts(update=fixed(update), publish=publish, pause=pause, recompute=recompute)
        cases.append(Case(name, measured, work, engine, parts, ends))

    for arm in read_result("arms_h200")["arms"]:
        if arm["arm"] in ("sync", "k1", "k2"):
            means, fates = arm["means"], arm["fates"]
            add(f"arms on H200, {arm['arm']}" + (" (fitted)" if arm["arm"] == "sync" else ""),
                1 / arm["steps_per_second"], three, means["timing_s/update"] + means["timing_s/fetch"],
                means["timing_s/publish"], generators=3, staleness={"sync": 0, "k1": 1, "k2": 2}[arm["arm"]],
                mean=means["completions/mean_length"],
                no_signal=fates["no_signal"] / (fates["no_signal"] + fates["trained"]))  # fmt: skip
    for phase in read_result("scaling_h200")["phases"]:
        steps = phase["steps"][1] - phase["steps"][0] + 1
        share = 1 - phase["trained_per_second"] * N / M / phase["rollouts_per_second"]
        alone = EngineSpeed(one.base, (512 / 27211 - one.base) / 512, 512)  # its best rate, in the same file
        add(f"scaling on H200, {phase['generators']} engine(s)", phase["seconds"] / steps,
            alone if phase["generators"] == 1 else three, phase["update_seconds_median"],
            phase["publish_seconds_median"], generators=phase["generators"], staleness=1,
            mean=phase["tokens_per_second"] / phase["rollouts_per_second"], no_signal=max(share, 0.0))  # fmt: skip
    for file in ("gsm8k_0.5b_h200_shared", "gsm8k_0.5b_h200"):
        for run in read_result(file)["runs"]:
            if file.endswith("shared") and run["run"].startswith("LoRA"):
                continue  # it is in the other file too
            config, stage, made = run["config"], run["seconds_per_step"], run["summary"]["rollouts"]["generated"]
            workers, steps = config["generator"]["workers"], run["summary"]["steps"]
            tokens = run["summary"]["tokens"]["sampled"]
            measured = statistics.mean(run["curves"]["timing_s/step"][FIRST:])
            engine = one
            if workers == 3:  # always full: their best rate is in their idle share
                best = tokens / steps / measured / (1 - run["idle_shares"]["generator"]) / workers
                engine = EngineSpeed(SHARED_BASE, (512 / best - SHARED_BASE) / 512, 512)
            add(f"GSM8K on H200, {run['run']}", measured, engine, stage["update"] + stage["fetch"], stage["publish"],
                generators=workers, ends=() if workers == 3 else ends, prompts=16, staleness=config["staleness"],
                mean=tokens / made, no_signal=1 - steps * 16 * N / made)  # fmt: skip
    return [*cases, *_newer_vllm_runs(pause)]


def _newer_vllm_runs(pause: float) -> list[Case]:
    """Runs since groups are issued as the engines have room, and with our scheduler in vLLM's engine."""
    cases: list[Case] = []
    # Ten steps, of which the first left a stock behind: modelled with the updates of its own steps, the first one among them.
    ten = records(read_result("two_cards_h200")["runs"][0]["steps"])
    best = max(row["generator/tokens_per_second"] / (1 - row["generator/idle_share"]) for row in ten[FIRST:]) / 3
    work = Workload(generators=3, prompts=16, n=N, m=M, staleness=3, lengths=LENGTHS, no_signal=0.07, steps=len(ten),
                    prompt_tokens=PROMPT_TOKENS)  # fmt: skip
    engine = EngineSpeed(SHARED_BASE, (512 / best - SHARED_BASE) / 512, 512)
    updates = itertools.cycle([row["timing_s/update"] for row in ten])
    publish = statistics.mean(row["timing_s/publish"] for row in ten)
    parts = Parts(update=lambda rollouts, tokens: next(updates), publish=publish, pause=pause,  # noqa: ARG005
                  recompute=compute_bound("0.5b") / 3)  # fmt: skip
    measured = statistics.mean(row["timing_s/step"] for row in ten[FIRST:])
    cases.append(Case("GSM8K on two H200s, 3 engines on a card, k=3", measured, work, engine, parts))
    # The same with versions that arrive beside the engines' steps and keys and values that are kept: its engines always had
    # rollouts waiting, so that what they made is what was trained and given up.
    staged = read_result("two_cards_staged_h200")["runs"][0]
    means, steps = staged["means"], records(staged["rows"])
    best = staged["generator"]["best_tokens_per_second"] / 3
    engine = EngineSpeed(SHARED_BASE, (512 / best - SHARED_BASE) / 512, 512)
    made = means["rollouts/generated"]
    length = staged["generator"]["tokens_per_second"] * means["timing_s/step"] / made
    work = Workload(generators=3, prompts=16, n=N, m=M, staleness=3, lengths=lognormal(length, 0.4, 512), steps=len(steps),
                    no_signal=1 - 16 * N / made)  # fmt: skip
    later = itertools.cycle([row["timing_s/update"] + row["timing_s/fetch"] for row in steps])
    pause = statistics.mean(
        row["generator/weights_seconds"] + row["generator/verifying_seconds"] for row in steps[FIRST:]
    )
    parts = Parts(update=lambda rollouts, tokens: next(later), publish=means["timing_s/publish"], pause=pause)  # noqa: ARG005
    measured = statistics.mean(row["timing_s/step"] for row in steps[FIRST:])
    cases.append(Case("GSM8K on two H200s, the same, staged, caches kept", measured, work, engine, parts))
    # Two engines and the learner on one card; groups without signal are left out of their step.
    two = engine_rate("two-logprobs") / 2
    engine = EngineSpeed(SHARED_BASE, (512 / two - SHARED_BASE) / 512, 512)
    for row in records(read_result("evidence_h200")["parts"]["gpu"]["explains"]):
        n, m = {"grpo": (16, 16), "grpo-ga": (64, 64), "grpo-pods": (64, 16)}[row["arm"]]
        work = Workload(generators=2, prompts=16, n=n, m=m, staleness=1, steps=40, prompt_tokens=PROMPT_TOKENS,
                        lengths=lognormal(row["completions/mean_length"], 0.4, 512))  # fmt: skip
        parts = Parts(update=fixed(row["timing_s/update"]), publish=row["timing_s/publish"], pause=pause, share=SHARE,
                      recompute=compute_bound("0.5b") / 2)  # fmt: skip
        name = f"GSM8K on one H200, {row['arm']}" + (" (fitted)" if row["arm"] == "grpo-ga" else "")
        cases.append(Case(name, row["timing_s/step"], work, engine, parts))
    return cases


def engine_rows(shape: str) -> list[dict[str, Any]]:
    """Records of the engine's benchmark on an H200."""
    return [json.loads(line) for line in (RESULTS / f"engine_{shape}_h200.jsonl").read_text().splitlines()]


def engine_rate(arm: str) -> float:
    """Tokens a second of an arm of the engine's benchmark at 0.5B, 64 rollouts a prompt."""
    rows = [row for row in engine_rows("0.5b") if row.get("arm") == arm and row.get("group_size") == 64]
    return rows[-1]["tokens_per_second"]


def compute_bound(shape: str) -> float:
    """Tokens a second that a card can compute at most, by its measured speed of large matrix products."""
    return statistics.median(row["compute_bound"] for row in engine_rows(shape) if "compute_bound" in row)
