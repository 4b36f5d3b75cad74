"""A long run of a small model in which something fails every so many steps, by a seeded schedule over all kinds of fault.

    python -m benchmarks.soak --steps 2000 --faults-every 20 --baselines 3 --minutes 20 --model DIR --train FILE --test FILE

The faults are done to the processes of a `pods train` of its own, from outside. Written down: what each fault cost until the
second step after it, how the run ended, how memory and handles of its processes grew, and what was left when it had ended.
The baselines are the same run without faults, from this seed and the next ones, side by side with it: they say how far
accuracies lie apart without faults. `--warm` takes the imports of Ray's workers, most of what a recovery on the CPU lasts,
out of the time. With `--exact`, which does only what leaves no trace in the weights, run and first baseline
have the same weights at `staleness: 0` on a CPU, bit for bit. Without `--model` the quickstart's is made (a minute or two).
Writes `benchmarks/results/soak.json` after each fault, so that a soak that is cut off tells what it has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._fault_schedule import EXACT, KILLS, OFTEN, SLOW, schedule_of
from benchmarks._faulted_run import Fault, FaultedRun
from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from benchmarks._run_processes import of_others, shared_memory_left
from pods_cluster.telemetry.run_folder import RunFolder

RESULT = Path(__file__).parent / "results" / "soak.json"
QUICK = (
    "generator.workers=2",
    "generator.rollouts_per_prompt=8",
    "selector.keep=4",
    "selector.no_signal=keep",
    "learner.workers=2",
    "learner.prompts_per_step=4",
    "learner.learning_rate=1e-4",
    "run.samples_every=0",
    "run.checkpoint.every=100",
    "run.checkpoint.keep=2",
    "run.checkpoint.copy_every=5",
)
"""Steps of a fraction of a second."""
MOMENT_SECONDS = 0.5
"""Longest time from a step's record to the fault, drawn anew each time: it comes while rollouts are made, in the update, while
weights are sent, while a copy is written."""
COLUMNS = ("step", "fault", "seconds", "steps_again", "resumed")


class Soak:
    """A run with faults and its baselines, side by side, and the result as far as it is known."""

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        steps: int,
        seed: int,
        baselines: int,
        minutes: float | None,
        warm: bool,
    ) -> None:
        self._shared = set(os.listdir("/dev/shm"))
        settings = [*settings, f"run.steps={steps}"]
        self.steps, self.seed = steps, seed
        self.run = FaultedRun(folder, "soak", [*settings, f"run.seed={seed}"], minutes=minutes, warm=warm)
        self.baselines = [
            FaultedRun(folder, f"baseline-{each}", [*settings, f"run.seed={each}"], minutes=minutes)
            for each in range(seed, seed + baselines)
        ]
        self.run.beside = self.baselines
        self.faults: list[dict[str, Any]] = []
        self.not_done: list[str] = []
        self.failure: str | None = None

    def go(self, schedule: Sequence[tuple[int, Fault]], limit: float, told: Callable[[], None]) -> None:
        """Do each fault once its step is made, `told` after each, and wait for the ends."""
        try:
            for step, fault in schedule:
                if not self.run.wait_for_step(step, limit):
                    break
                time.sleep(random.Random(f"{self.seed} {step}").uniform(0.0, MOMENT_SECONDS))
                if (cost := self.run.do(fault, limit)) is None:
                    self.not_done.append(f"{fault} at step {step}: there is no such process")
                    print(self.not_done[-1], flush=True)
                else:
                    self.faults.append(cost)
                    print(json.dumps(cost), flush=True)
                told()
            for run in (self.run, *self.baselines):
                run.end(limit * self.steps)
                told()
        except RuntimeError as error:
            self.failure = str(error)
        finally:
            for run in (self.run, *self.baselines):
                run.kill()

    def result(self, *, over: bool) -> dict[str, Any]:
        """The result as far as it is known; `over`: all commands have ended, and what they left is looked for."""
        run = self.run
        records, events = _records(run.folder), _events(run.folder)
        times = [record["timing_s/step"] for record in records if "timing_s/step" in record]
        result: dict[str, Any] = {
            "over": over,
            "failure": self.failure,
            "seconds": run.seconds,
            "ended_early": run.ended_early,
            "exit_codes": run.exit_codes,
            "steps_recorded": len(times),
            "steps_made": run.made,
            "median_step_s": statistics.median(times) if times else None,
            "restarts": sum(event["kind"] == "restarting" for event in events),
            "faults_done": len(self.faults),
            "faults_not_done": self.not_done,
            "ended_wrongly": sum(cost["resumed"] and not cost["fault"].startswith("command") for cost in self.faults),
            "faults_by_kind": _by_kind(self.faults),
            "accuracy": {"soak": _accuracy(run.folder)}
            | {each.folder.path.name: _accuracy(each.folder) for each in self.baselines},
            "growth": run.watch.growth(),
            "growth_without_faults": self.baselines[0].watch.growth() if self.baselines else {},
            "steps_without_faults": self.baselines[0].made if self.baselines else None,
        }
        if over:
            everyone = (run, *self.baselines)
            result["processes_left"] = [title for each in everyone for title in each.watch.leftovers()]
            result["ports_left"] = [port for each in everyone for port in each.watch.ports_left()]
            ours = {pid for each in everyone for pid in each.watch.watched}
            result["shared_memory_left"] = [
                name for name in shared_memory_left(self._shared) if not of_others(name, ours)
            ]
            if self.baselines and run.folder.model.exists() and self.baselines[0].folder.model.exists():
                pair = [each.folder.model / "model.safetensors" for each in everyone[:2]]
                result["same_weights"] = pair[0].read_bytes() == pair[1].read_bytes()
        return result | {"faults": table(self.faults, COLUMNS)}


def soak(
    folder: Path,
    settings: Sequence[str],
    *,
    steps: int,
    every: int,
    seed: int = 0,
    baselines: int = 0,
    kills: Sequence[Fault] = KILLS,
    slow: Sequence[Fault] = (),
    minutes: float | None = None,
    limit: float = 600.0,
    warm: bool = False,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run with faults, and so often without; what came out. `told` gets it after each fault too, as far as it is known."""
    about = {"machine": machine(), "steps": steps, "every": every, "seed": seed, "warm": warm}
    about["settings"] = [item for item in settings if ".path=" not in item]
    found = Soak(folder, settings, steps=steps, seed=seed, baselines=baselines, minutes=minutes, warm=warm)
    tell = told or (lambda _: None)
    found.go(schedule_of(steps, every, seed, kills, slow), limit, lambda: tell(about | found.result(over=False)))
    result = about | found.result(over=True)
    tell(result)
    return result


def _by_kind(faults: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each kind of fault: how often, seconds until the second step after it, and steps that were made again at most."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fault in faults:
        kinds[fault["fault"]].append(fault)
    found = {}
    for kind, each in sorted(kinds.items()):
        seconds = [fault["seconds"] for fault in each if fault["seconds"] is not None]
        found[kind] = {
            "times": len(each),
            "median_s": statistics.median(seconds) if seconds else None,
            "most_s": max(seconds, default=None),
            "most_steps_again": max(fault["steps_again"] for fault in each),
        }
    return found


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return folder.read_metrics() if folder.metrics.exists() else []


def _events(folder: RunFolder) -> list[dict[str, Any]]:
    return folder.read_events() if folder.events.exists() else []


def _accuracy(folder: RunFolder) -> dict[str, float | None]:
    """The last evaluation, its step, and the mean reward of the last tenth of the steps, at least of five."""
    records = _records(folder)
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    last = next((each for each in reversed(records) if each.get("eval/greedy_accuracy") is not None), {})
    return {
        "greedy": last.get("eval/greedy_accuracy"),
        "at_step": last.get("step"),
        "reward": statistics.fmean(rewards[-max(5, len(rewards) // 10) :]) if rewards else None,
    }


def keep(runs: Path, folder: Path) -> None:
    """Copy what tells how the runs went: their output and events, and what Ray's GCSs said."""
    ray = Path(tempfile.gettempdir()) / "ray"
    for root, pattern in ((runs, "*.log"), (runs, "*/events.jsonl"), (ray, "session_2*/logs/gcs_server*")):
        for path in root.glob(pattern):
            if path.stat().st_size and path.stat().st_mtime > runs.stat().st_ctime - 7200:
                target = folder / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


def _model(arguments: argparse.Namespace) -> list[str]:
    """The settings that say where model and rows are; made where they were not given."""
    model, train, test = arguments.model, arguments.train, arguments.test
    if model is None:
        from pods_cluster.quickstart.warm_start import WarmStart, prepare

        made = prepare(arguments.cache, WarmStart())
        model, train, test = made.model, made.data / "train.jsonl", made.data / "test.jsonl"
    return [f"model.path={model.absolute()}", f"data.path={train.absolute()}", f"data.eval.path={test.absolute()}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model, with its tokenizer; --train and --test with it")
    parser.add_argument("--train", type=Path, help="rows with `prompt` and `answer`, JSON Lines")
    parser.add_argument("--test", type=Path, help="held-out rows")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the quickstart's model is made else")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults-every", type=int, default=20, help="steps between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and of the run")
    parser.add_argument("--minutes", type=float, help="end cleanly after so long, whatever the step")
    parser.add_argument("--no-slow", action="store_true", help="nothing that is noticed by silence alone")
    parser.add_argument(
        "--baselines", type=int, default=1, help="runs without faults, from this seed and the next ones"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="the run's workers are forks of a process that has their imports, on the CPU",
    )
    parser.add_argument("--exact", action="store_true", help="only faults that leave no trace in the weights")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--keep", type=Path, help="folder for the events and logs of the runs and of Ray's GCS")
    parser.add_argument("overrides", nargs="*", help="key=value, as in model.path=…")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.train is None) or (arguments.model is None) != (arguments.test is None):
        parser.error("--model, --train and --test are given together")
    settings = [*_model(arguments), *QUICK, f"run.eval.every={max(arguments.steps // 4, 1)}", *arguments.overrides]
    kills, slow = [*KILLS, *OFTEN], [] if arguments.no_slow else list(SLOW)
    if arguments.exact:
        kills, slow = ([fault for fault in each if fault.role in EXACT] for each in (kills, slow))
    with tempfile.TemporaryDirectory() as folder:
        result = soak(
            Path(folder),
            settings,
            steps=arguments.steps,
            every=arguments.faults_every,
            seed=arguments.seed,
            baselines=arguments.baselines,
            kills=kills,
            slow=slow,
            minutes=arguments.minutes,
            warm=arguments.warm,
            told=lambda result: write_result(arguments.out, result),
        )
        if arguments.keep is not None:
            keep(Path(folder), arguments.keep)
    print(json.dumps({name: value for name, value in result.items() if name != "faults"}, indent=1, default=str))


if __name__ == "__main__":
    main()
