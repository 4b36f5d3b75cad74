"""The paper's claims on the quickstart's task made hard, without a GPU: three arms, n, m and the rules, over seeds.

    python -m benchmarks.evidence --quick                        # under 40 minutes on two cores
    python -m benchmarks.evidence                                # everything; under 4 hours on two cores
    python -m benchmarks.evidence --seeds 1 --seconds 10 --parts arms --arms grpo,grpo-pods --work /tmp/evidence --out /tmp/e.json

The model adds seldom (`--target` of the sums right before RL), so that few of n answers are right. Each run has the same
seconds of training: `pods sweep` runs them, one to a core, and goes on with what an earlier call left; nothing finished is run
again. Times are this machine's own, and told by clocks of GPUs (`evidence_clocks`). Writes
`benchmarks/results/evidence_cpu.json`; `python -m benchmarks.evidence_page` makes docs/evidence.md and its figures from that.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._machine import machine
from benchmarks._result_file import records, write_result
from benchmarks.evidence_answers import RESULT, answer
from benchmarks.evidence_clocks import as_rows, clocks, measure_paced
from pods_cluster.client.compare_command import read_arms
from pods_cluster.quickstart.__main__ import publish
from pods_cluster.quickstart.warm_start import Prepared, WarmStart, prepare
from pods_cluster.telemetry.curves import RunSeries
from pods_cluster.telemetry.speedup import Target

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "configs" / "sweeps"


@dataclass(frozen=True, slots=True)
class Part:
    """One question: a sweep, the arms of it that `--quick` runs, and arms of the `arms` part that belong to it too."""

    name: str
    baseline: str
    quick: tuple[str, ...]
    borrowed: Mapping[str, str]
    """Arm of the three-arms sweep -> its name here: not run twice."""
    quick_seeds: int = 1
    told_by_clocks: bool = False
    """Whether what its arms make and train differs, so that clocks of GPUs tell another time than this machine's."""
    beside: tuple[tuple[str, str], ...] = ()
    """Arms (arm, other) that are told beside one another, not beside the baseline alone."""

    @property
    def file(self) -> Path:
        return SWEEPS / f"{self.name}.yaml"


PARTS = {
    "arms": Part("three-arms-cpu", "grpo-ga", (), {}, quick_seeds=3, told_by_clocks=True),
    "n": Part("rollouts-cpu", "n8", ("n16", "n128"), {"grpo": "n8", "grpo-pods": "n64"}, told_by_clocks=True),
    "m": Part("kept-cpu", "m32", ("m32", "m2"), {"grpo-pods": "m8"}, told_by_clocks=True),
    "rules": Part("rules-cpu", "random", ("max_reward", "random"), {"grpo-pods": "max_variance"},
                  beside=(("max_variance", "max_variance-group"),)),
    "prompts": Part("prompts-cpu", "all", ("all", "revisit-adaptive"), {}),
    "staleness": Part("staleness-cpu", "k0", ("k0", "k2", "k2-uncorrected"), {},
                      beside=tuple((f"k{k}", f"k{k}-uncorrected") for k in range(1, 5))),
    "settling": Part("settling-cpu", "settle-off", ("settle-waves",), {"grpo-pods": "settle-off"}),
}  # fmt: skip
QUICK_SECONDS, SECONDS = 60.0, 120.0
RUN_GIB = 3.0
"""Memory of one run: controller, generator, learner and Ray's own processes, 2 to 2.5 GiB."""
ARM_SIZES = {"grpo": (8, 8), "grpo-ga": (64, 64), "grpo-pods": (64, 8)}


def runs_side_by_side() -> int:
    """One run to a core that this process may use, where the memory is enough: a run keeps about one core busy."""
    here = machine()
    return max(1, min(here["cores"], int(here["memory_gib"] / RUN_GIB)))


def prepared(work: Path, target: float) -> Prepared:
    """The model and the data, made once: some minutes of supervised steps."""
    made = prepare(work / "cache", WarmStart(target=target, check_every=5), threads=machine()["cores"])
    publish(made, work)
    print(f"model: {made.report.greedy:.1%} of {made.report.rows['test']} held-out sums right, {made.report.sampled:.1%} when "
          f"sampled", flush=True)  # fmt: skip
    return made


def run_part(part: Part, work: Path, arguments: argparse.Namespace, *, seconds: float, seeds: int) -> None:
    """Run one sweep, or what is left of it. Raises SystemExit where a run failed."""
    from pods_cluster.config.sweep import load_sweep

    wanted = [arm for arm in load_sweep(part.file).arms if arm not in part.borrowed.values()]
    if arguments.quick and part.quick:
        wanted = [arm for arm in wanted if arm in part.quick]
    if arguments.arms:
        wanted = [arm for arm in wanted if arm in arguments.arms.split(",")]
    if not wanted:
        return
    command = [
        sys.executable, "-m", "pods_cluster.client.cli", "sweep", str(part.file), "--plain",
        "--arms", ",".join(wanted), "--seeds", str(seeds), "--parallel", arguments.parallel,
        f"run.dir={work / 'runs'}", f"run.max_seconds={seconds:g}", f"model.path={work / 'model'}",
        f"data.path={work / 'data' / 'train.jsonl'}", f"data.eval.path={work / 'data' / 'test.jsonl'}",
        *arguments.set,
    ]  # fmt: skip
    print("+", " ".join(command[2:]), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(f"{part.name}: the sweep ended with {code}; the same command goes on with it")


def arms_of(part: Part, work: Path) -> dict[str, list[RunSeries]]:
    """The runs of a part by arm, the borrowed ones first. Raises ConfigError where none has a step."""
    runs = work / "runs"
    found: dict[str, list[RunSeries]] = {}
    if part.borrowed:
        three, _ = read_arms([str(runs / PARTS["arms"].name)])
        found = {name: three[arm] for arm, name in part.borrowed.items() if arm in three}
    if (runs / part.name).is_dir():
        own, _ = read_arms([str(runs / part.name)])
        found |= own
    order = list(_order(part))
    return {arm: found[arm] for arm in sorted(found, key=lambda arm: order.index(arm) if arm in order else len(order))}


def _order(part: Part) -> Sequence[str]:
    from pods_cluster.config.sweep import load_sweep

    return list(load_sweep(part.file).arms)


def quick_time(result: Mapping[str, Any]) -> dict[str, Any]:
    """How long a result of `--quick` took, and where. A round is the runs of a sweep that are made at one time."""
    made = [
        sum(len(seeds) for arm, seeds in part["seeds"].items() if arm not in PARTS[name].borrowed.values())
        for name, part in result["parts"].items()
    ]
    rounds = sum(math.ceil(runs / int(result["parallel"])) for runs in made)
    told = {name: result[name] for name in ("minutes", "seconds", "parallel")}
    where = {name: result["machine"][name] for name in ("cpu", "cores")}
    return {
        "rounds": rounds,
        "all_rounds": rounds,
        "runs": sum(made),
        **told,
        **where,
        "arms": quick_arms(result["parts"]),
    }


def quick_arms(parts: Mapping[str, Any]) -> dict[str, Any] | None:
    """How much sooner grpo-pods was than grpo-ga in a result of `--quick`, and the seconds of their updates."""
    if "arms" not in parts:
        return None
    part = parts["arms"]
    updates = {row["arm"]: row["timing_s/update"] for row in records(part["explains"])}
    (row,) = (row for row in records(part["rows"]) if (row["arm"], row["axis"]) == ("grpo-pods", "training-minutes"))
    kept = {name: row[name] for name in ("reaches_at", "speed_up", "speed_up_low", "speed_up_high")}
    return kept | {"pairs": len(part["seeds"]["grpo-pods"]), "update": [updates["grpo-ga"], updates["grpo-pods"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"fewer arms and seeds, {QUICK_SECONDS:g} seconds each")
    parser.add_argument(
        "--prepare", action="store_true", help="make the model and the data in .cache/hard-addition, and end"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--arms", help="of these arms alone")
    parser.add_argument(
        "--seeds",
        type=int,
        help="seeds of each arm; as in the sweeps' files, with --quick 3 of the arms and 1 of the others",
    )
    parser.add_argument(
        "--seconds", type=float, help=f"training seconds of each run; {SECONDS:g}, with --quick {QUICK_SECONDS:g}"
    )
    parser.add_argument("--parallel", default=str(runs_side_by_side()), help="runs at once; one to a core, or auto")
    parser.add_argument(
        "--target", type=float, default=0.1, help="share of sums right at which the supervised start ends"
    )
    parser.add_argument("--accuracy", type=float, help="accuracy to reach; left out: 99 %% of the baseline's best")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--no-run", action="store_true", help="only read the runs that are in --work")
    parser.add_argument(
        "--no-paced", action="store_true", help="do not check the clocks on pools that keep time, as --quick"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".cache" / "evidence", help="folder of the model and the runs"
    )
    parser.add_argument("--quick-result", type=Path, help="a result of --quick, whose time is told beside")
    parser.add_argument(
        "--out", type=Path, help=f"left out: {RESULT.relative_to(ROOT)}, with --quick evidence_quick.json in --work"
    )
    arguments = parser.parse_args()
    if arguments.prepare:
        prepared(ROOT / ".cache" / "hard-addition", arguments.target)
        return
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}")
    arguments.work = arguments.work.resolve()
    began, started = machine(), time.monotonic()
    made = prepared(arguments.work, arguments.target)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    for name in () if arguments.no_run else parts:
        seeds = arguments.seeds or (PARTS[name].quick_seeds if arguments.quick else 5)
        run_part(PARTS[name], arguments.work, arguments, seconds=seconds, seeds=seeds)
    which = clocks()
    result: dict[str, Any] = {
        "benchmark": "evidence",
        "machine": began,
        "command": " ".join(["python -m benchmarks.evidence", *sys.argv[1:]]),
        "start": {"greedy": made.report.greedy, "sampled": made.report.sampled, "rows": made.report.rows["test"]},
        "seconds": seconds,
        "parallel": arguments.parallel,
        "target": arguments.accuracy,
        "clocks": as_rows(which),
        "parts": {},
    }
    for name in parts:
        part = PARTS[name]
        told = which if part.told_by_clocks else ()
        result["parts"][name] = answer(
            arms_of(part, arguments.work),
            part.baseline,
            Target(arguments.accuracy),
            told,
            by_steps=name == "arms",
            beside=part.beside,
        )
    if "arms" in parts and not (arguments.no_paced or arguments.quick):
        result |= measure_paced(ARM_SIZES, [clock for clock in which if clock.name.startswith("3b")], prompts=16)
    result["minutes"] = None if arguments.no_run else (time.monotonic() - started) / 60
    if arguments.quick_result:
        result["quick"] = quick_time(json.loads(arguments.quick_result.read_text(encoding="utf-8")))
    out = arguments.out or (arguments.work / "evidence_quick.json" if arguments.quick else RESULT)
    write_result(out, result)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
