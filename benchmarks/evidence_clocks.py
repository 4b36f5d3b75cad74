"""Clocks for `benchmarks/evidence.py`: what the steps of a run would take on GPUs, by rates that were measured there.

The training itself is real and small; only its time is told by another clock. A step takes the sum of generating, updating
and sending weights at staleness 0, and with two pools that overlap the longer of both. `paced_seconds` checks that sum: the
real loop, workers and selector run with an engine and a learner that keep these rates, or `speed` times these.

    python -m benchmarks.evidence_clocks      # that check alone, some minutes; into benchmarks/results/evidence_cpu.json
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import write_result
from pods_cluster.telemetry.curves import RunSeries

RESULTS = Path(__file__).parent / "results"
ROLLOUT_TOKENS = 269
"""Completion tokens of a rollout in benchmarks/update_speed.py, in the mean: the same length for both pools."""
KEPT, ALL = 16 * 16, 16 * 64
"""Rollouts of the two updates that were measured there: 16 groups, m = 16 and all 64."""
PACED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of one rollout made and of one trained, and of new weights; `overlap`: both pools work at once."""

    name: str
    about: str
    made: float
    trained: float
    weights: float
    overlap: bool = False

    def step_seconds(self, made: float, trained: float) -> float:
        """Seconds of a step that makes and trains so many rollouts."""
        generate, update = made * self.made, trained * self.trained + self.weights
        return max(generate, update) if self.overlap else generate + update

    def retell(self, run: RunSeries) -> RunSeries:
        """The run with this clock's `timing_s/step`, by what each of its steps made and trained."""
        told = []
        for record in run.records:
            made, trained = record.get("rollouts/generated"), record.get("rollouts/trained")
            own = {} if made is None else {"timing_s/step": self.step_seconds(made, trained or 0.0)}
            told.append({name: value for name, value in record.items() if name != "timing_s/step"} | own)
        return RunSeries(run.name, told, run.config)


def clocks() -> list[Clock]:
    """The clocks, from the files of results that say what was measured."""
    peers = json.loads((RESULTS / "peers_h200.json").read_text())
    card = next(arm for arm in peers["arms"] if arm["name"] == "ours-64-k1")
    small = _update_seconds("update_speed_0.5b_h200.json", 32768)
    large = _update_seconds("update_speed_3b_h200.json", 16384)
    lines = [json.loads(line) for line in (RESULTS / "engine_3b_h200.jsonl").read_text().splitlines()]
    engine = max(line["tokens_per_second"] for line in lines if line.get("engines") == 1)
    of_small = ROLLOUT_TOKENS / card["made_per_second"], small, card["stages"]["publish"]
    of_large = ROLLOUT_TOKENS / engine, large, 0.07
    sources = {
        "0.5b": f"0.5B on H200s: {card['made_per_second']:,.0f} tokens/s made (peers_h200.json), {1000 * small:.2f} ms a rollout "
        "trained (update_speed_0.5b_h200.json)",
        "3b": f"3B on H200s: {engine:,} tokens/s made (engine_3b_h200.jsonl), {1000 * large:.2f} ms a rollout trained "
        "(update_speed_3b_h200.json)",
    }
    return [
        Clock("0.5b", f"{sources['0.5b']}, in turns", *of_small),
        Clock("0.5b-overlap", f"{sources['0.5b']}, a card each, overlapping", *of_small, overlap=True),
        Clock("3b", f"{sources['3b']}, in turns", *of_large),
        Clock("3b-overlap", f"{sources['3b']}, a card each, overlapping", *of_large, overlap=True),
    ]


def _update_seconds(name: str, budget: int) -> float:
    """Seconds of an update for each rollout in it, packed with Liger's kernels."""
    result = json.loads((RESULTS / name).read_text())
    (found,) = (arm for arm in result["arms"] if arm["arm"] == "liger-packed" and arm["budget"] == budget)
    return found["seconds"] / KEPT


async def paced_seconds(
    arms: Mapping[str, tuple[int, int]], clock: Clock, prompts: int, speed: float = 1.0
) -> list[dict[str, Any]]:
    """Seconds a step of arms (label -> n, m) as the real loop makes them of this clock's rates, and as the clock tells.

    With `speed` the rates are so many times as high; the service and the machine are not, so that what they take is told
    as so many times more.
    """
    from benchmarks.paced import PacedLearners, PacedPublisher, Pools, make_files, paced_config

    rate = speed * ROLLOUT_TOKENS / clock.made
    engine = {"tokens_per_second": rate, "shortest": 26, "longest": 512, "accuracy": 0.5, "reward_token": 5}

    def config(folder: Path, n: int, m: int) -> Any:
        return paced_config(
            folder,
            {"rollouts_per_prompt": n, "max_sequences": 1024, "max_tokens": 513, "engine_options": engine},
            selector={"keep": m},
            learner={"prompts_per_step": prompts, "tokens_per_microbatch": 4096},
            staleness=int(clock.overlap),
            run={"steps": PACED_STEPS},
        )

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pods-evidence-") as place:
        folder = Path(place)
        make_files(folder)
        pools = Pools(config(folder, 64, 8))
        try:
            await pools.start(1)
            for label, (n, m) in arms.items():
                learners = PacedLearners(tokens_per_second=speed * ROLLOUT_TOKENS / clock.trained)
                arm = await pools.arm(config(folder, n, m), learners, PacedPublisher(clock.weights / speed))
                rows.append(
                    {
                        "clock": clock.name,
                        "arm": label,
                        "seconds": speed / arm.steps_per_second(),
                        "told": clock.step_seconds(prompts * n, prompts * m),
                    }
                )
        finally:
            await pools.close()
    return rows


def measure_paced(
    arms: Mapping[str, tuple[int, int]], which: Sequence[Clock], prompts: int, speed: float = 1.0
) -> dict[str, Any]:
    """`paced_seconds` of several clocks, on a Ray cluster of its own, as a part of a result."""
    import ray

    began = {name: value for name, value in machine().items() if name in ("cpu", "cores", "load_1min")}
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="pods")
    try:
        rows = [row for clock in which for row in asyncio.run(paced_seconds(arms, clock, prompts, speed))]
    finally:
        ray.shutdown()
    return {"paced": rows, "paced_machine": began, "paced_speed": speed}


def as_rows(which: Sequence[Clock]) -> list[dict[str, Any]]:
    return [asdict(clock) for clock in which]


def main() -> None:
    from benchmarks.evidence import ARM_SIZES

    file = RESULTS / "evidence_cpu.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result |= measure_paced(ARM_SIZES, [clock for clock in clocks() if clock.name.startswith("3b")], prompts=16)
    write_result(file, result)
    for row in result["paced"]:
        print(row)


if __name__ == "__main__":
    main()
