"""Where the service becomes the bound as the pools grow: a model of the pipeline, checked against measured runs.

    python -m benchmarks.scale [--part check --part sweep]

`check` models runs of `benchmarks/results/` from their stages' times and compares the seconds of a step. `sweep` goes to
1,000 generators and 64 learner ranks with models of 7B to 70B; costs of calls are those of `service_calls.json` and
`selection.json`. `docs/scale.md` says what is measured in it and what is assumed. Writes `benchmarks/results/scale.json`
and draws `docs/images/scale.png`. CPU only, some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from benchmarks.scale_check import LENGTHS, PROMPT_TOKENS, RESULTS, M, N, check, compute_bound, read_result
from benchmarks.scale_figure import draw
from benchmarks.scale_inputs import EngineSpeed, Outcome, Parts, Workload
from benchmarks.scale_model import simulate

RESULT = RESULTS / "scale.json"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "scale.png"
GENERATORS = (4, 16, 64, 128, 256, 512, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=("check", "sweep"), help="left out: both")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.is_file() else {}
    result["machine"] = machine()
    parts = options.part or ["check", "sweep"]
    if "check" in parts:
        result["check"] = table(
            check(), ("run", "measured", "modelled", "spread", "error", "within", "fastest", "slowest")
        )
    if "sweep" in parts:
        result["sweep"] = table(sweep(costs()), COLUMNS)
    write_result(options.out, result)
    if "sweep" in result and options.out == RESULT:
        draw(result, FIGURE)


@dataclass(frozen=True, slots=True)
class Size:
    """A model in the sweep: parameters in thousands of millions, and cards of one engine."""

    name: str
    parameters: float
    cards: int


SIZES = (Size("7B", 7.6, 1), Size("32B", 32.8, 2), Size("70B", 70.6, 4))
MEASURED = 3.09
"""Thousands of millions of parameters of the model whose speeds the sizes are scaled from."""
TENSOR_PARALLEL = 0.8
"""Assumed: what a card makes in an engine of several, of what it would alone."""
NETWORK = 50e9
"""Assumed: bytes a second of a node's network (400 Gbit/s)."""
SLOTS = 512
RANKS = 64


def costs() -> dict[str, float]:
    """Seconds of each call and stage, from the result files that hold them."""
    calls = read_result("service_calls")["cpu_seconds"]
    actor = read_result("selection")["actor"]
    few, many = actor["8"]["10"]["groups_per_cpu_s"], actor["32"]["10"]["groups_per_cpu_s"]
    message = (1 / few - 1 / many) / (1 / 8 - 1 / 32)
    one, three = read_result("weights_3b_h200"), read_result("weights_3b_three_h200")
    update = next(arm for arm in read_result("update_speed_3b_h200")["arms"] if arm["arm"] == "liger-packed")
    return {
        **calls,
        "selector_message": message,
        "selector_group": 1 / many - message / 32,
        "publish_bytes_per_second": one["bytes"] / one["median_seconds"],
        "publish_receiver": (three["median_seconds"] - one["median_seconds"]) / 2,
        "pause": statistics.median(item["longest_gap_seconds"] for item in one["pauses"]),
        "compute_bound_3b": compute_bound("3b"),
        "engine_tokens_per_second_3b": 52967.0,
        "rank_tokens_per_second_3b": update["predicted_tokens"] / update["passes_seconds"],
        "optimiser_step": update["optimiser_step_seconds"],
    }


def engine_of(size: Size, found: Mapping[str, float]) -> EngineSpeed:
    """An engine's speed, by the 3B one's: its step at 1,024 rollouts takes longer as the parameters are more, and 36 % of it
    is there without rollouts, as in the 0.5B runs."""
    cards = size.cards * (TENSOR_PARALLEL if size.cards > 1 else 1.0)
    full = 1024 / found["engine_tokens_per_second_3b"] * size.parameters / MEASURED / cards
    return EngineSpeed(0.36 * full, 0.64 * full / 1024, SLOTS)


def parts_of(size: Size, generators: int, found: Mapping[str, float], *, ranks: int | None, change: str) -> Parts:
    """The service's costs with one `change` made; `ranks` None: a learner that takes no time."""
    made = ", ".join(SINGLE) if change == "all of these" else change
    receivers, weights = generators * size.cards, size.parameters * 1e9 * 2
    hops = math.log2(receivers + 1) if "tree" in made else receivers
    senders = min(ranks or RANKS, 8) if "many senders" in made else 1
    publish = weights / min(found["publish_bytes_per_second"], NETWORK) / senders + hops * found["publish_receiver"]
    cards = size.cards * (TENSOR_PARALLEL if size.cards > 1 else 1.0)
    recompute = found["compute_bound_3b"] * MEASURED / size.parameters * cards
    rate = found["rank_tokens_per_second_3b"] * MEASURED / size.parameters
    gradients = 2 * weights / NETWORK

    def update(rollouts: int, tokens: float) -> float:  # noqa: ARG001
        return 0.0 if ranks is None else tokens / (rate * ranks) + gradients + found["optimiser_step"]

    described = found["controller_call_with_specs" if "specs" in made else "controller_call_with_reference"]
    return Parts(
        update=update,
        publish=publish,
        pause=found["pause"],
        recompute=math.inf if "kept cache" in made else recompute,
        ranks=ranks or RANKS,
        selector_message=found["selector_message"],
        selector_group=found["selector_group"],
        selectors=4 if "selectors" in made else 1,
        controller_group=found["controller_group"],
        controller_call=(described + found["controller_call"]) / 2,
        controllers=4 if "controllers" in made else 1,
        plan_rollout=found["plan_rollout"],
        fetch_call=found["fetch_call"],
        fetch_rollout=found["fetch_rollout"],
        link=NETWORK,
    )


BUSY = ("generator", "selector", "controller", "plan", "fetch", "update", "calls", "publish")
"""Parts by the share of the time in which they were at work."""
COLUMNS = (
    "size",
    "generators",
    "ranks",
    "change",
    "seconds_per_step",
    "tokens_per_second",
    "efficiency",
    "bound",
    *BUSY,
)
"""`ranks` null: a learner that takes no time. `efficiency`: tokens a second against engines that are always full."""
SINGLE = ("4 selectors", "4 controllers", "tree broadcast", "many senders", "kept cache")
CHANGES = ("specs in every call", *SINGLE, "all of these")


def sweep(found: Mapping[str, float]) -> list[dict[str, Any]]:
    """Pools of every size, with 64 learner ranks and with a learner that takes no time; then each change where it counts."""
    plain = [
        (size, generators, ranks, "as it is") for size in SIZES for generators in GENERATORS for ranks in (RANKS, None)
    ]
    ends = [(size, generators) for size in (SIZES[0], SIZES[2]) for generators in (256, 1000)]
    changed = [(size, generators, None, change) for size, generators in ends for change in CHANGES]
    return [_row(size, generators, found, ranks, change) for size, generators, ranks, change in [*plain, *changed]]


def _row(size: Size, generators: int, found: Mapping[str, float], ranks: int | None, change: str) -> dict[str, Any]:
    engine = engine_of(size, found)
    # As many groups as fill all engines and an eighth more, with those of one step in training.
    prompts = math.ceil(1.125 * generators * SLOTS / N)
    work = Workload(
        generators=generators,
        prompts=prompts,
        n=N,
        m=M,
        staleness=1,
        lengths=LENGTHS,
        steps=7,
        bundle=16,
        grain=10,
        prompt_tokens=PROMPT_TOKENS,
    )
    outcome = simulate(work, engine, parts_of(size, generators, found, ranks=ranks, change=change))
    row = {
        "size": size.name,
        "generators": generators,
        "ranks": ranks,
        "change": change,
        "seconds_per_step": round(outcome.seconds_per_step, 2),
        "tokens_per_second": round(outcome.tokens_per_second),
        "efficiency": round(outcome.tokens_per_second / (generators * engine.full_rate), 3),
        "bound": bound_of(outcome),
        **{name: round(outcome.busy[name], 3) for name in BUSY},
    }
    print(row, flush=True)
    return row


CHAIN = ("plan", "fetch", "update", "calls", "publish")
"""The parts of a step that come one after another once its groups are there."""


def bound_of(outcome: Outcome) -> str:
    """The part that sets the pace: the largest of the learner's chain where that is never idle, else the busiest other."""
    busy = outcome.busy
    chain = sum(busy[name] for name in CHAIN)
    others = {name: busy[name] for name in ("generator", "selector", "controller")}
    if chain >= max(others.values()):
        return max(CHAIN, key=lambda name: busy[name])
    return max(others, key=lambda name: others[name])


if __name__ == "__main__":
    main()
