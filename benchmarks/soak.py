"""A long run of the quickstart in which something fails every so many steps, by a seeded schedule over all kinds of fault.

    make quickstart; python -m benchmarks.soak --steps 2000 --every 20 --baseline

The faults are done to the processes of a `pods train` of its own, from outside. Written down: what each fault cost until the
second step after it, how the run ended, how the memory of each process grew, and what was left when it had ended. With
`--baseline` the same run is made without faults too, to compare the reward at the end; with `--exact`, which leaves generators
and scorers alone, both have the same weights at `staleness: 0` on a CPU, bit for bit.
Writes `benchmarks/results/soak.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._machine import machine
from benchmarks._result_file import table, write_result
from pods_cluster.client.demo import CONFIG
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import drop_superseded

RESULT = Path(__file__).parent / "results" / "soak.json"
TITLES = {
    "generator": "ray::GeneratorWorker",
    "learner": "ray::LearnerRank",
    "selector": "ray::SelectorActor",
    "controller": "ray::Controller",
    "scorer": "scorer_main",
}
"""By what a process of each role is known: its title, or a part of its command line."""
KINDS = tuple((role, signal.SIGKILL) for role in TITLES)
EXACT = ("learner", "selector", "controller")
"""What fails without a trace in the weights: all else goes on from a state, with the same random streams. A lost generator's
groups come again as other attempts, and a killed scorer's reward is left out."""
STOPS = (("learner", signal.SIGSTOP), ("selector", signal.SIGSTOP), ("controller", signal.SIGSTOP))
"""Hung processes: noticed after half a minute and more."""
LOOK_SECONDS = 0.05
SAMPLE_SECONDS = 5.0
FIRST_SECONDS = 30.0
"""Life of a process whose growth is not looked at: it still takes in what it needs."""
SAMPLES = 6
GONE_SECONDS = 20.0


class Soak:
    """One `pods train` and what is done to it."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str]) -> None:
        self.folder = RunFolder(folder / name)
        command = [sys.executable, "-m", "pods_cluster.client.cli", "train", "--plain", str(CONFIG), *overrides]
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"run.dir={folder}", f"run.name={name}", "cluster.address=local"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.seen: dict[int, psutil.Process] = {}
        self.memory: dict[int, tuple[str, list[tuple[float, float]]]] = {}
        self.handles: list[tuple[float, float]] = []
        self._sampled_at = 0.0
        self._began = time.monotonic()
        self._steps: list[dict[str, Any]] = []
        self._offset = 0

    def faults(self, schedule: Sequence[tuple[int, str, signal.Signals]], limit: float) -> list[dict[str, Any]]:
        """Do each fault once its step is made; what each cost. Raises RuntimeError when the run stands still."""
        done = []
        for step, role, number in schedule:
            if not self.wait_for_step(step, limit):
                break
            there = self._made()
            if (victim := self.newest(TITLES[role])) is None:
                continue
            victim.send_signal(number)
            began = time.monotonic()
            self._wait(lambda there=there: self._made() > there + 1, limit)
            done.append({"step": step, "role": role, "signal": number.name, "seconds": time.monotonic() - began})
            print(done[-1], flush=True)
        return done

    def wait_for_step(self, step: int, limit: float) -> bool:
        """Wait until the run has made this step; false where the command has ended before."""
        return self._wait(lambda: self._standing() >= step, limit)

    def end(self, limit: float) -> int:
        """Wait for the end of the command; its exit code."""
        self._wait(lambda: False, limit)
        return self.process.wait()

    def leftovers(self) -> list[str]:
        """Processes of the run that are there after its end."""
        deadline = time.monotonic() + GONE_SECONDS
        while (left := [process for process in self.seen.values() if lives(process)]) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [_title(process) for process in left]

    def growth(self) -> dict[str, dict[str, float]]:
        """MiB an hour by which the processes of each role grew, median and largest, over those that lived long enough."""
        slopes: dict[str, list[float]] = defaultdict(list)
        for role, samples in self.memory.values():
            late = [(at, size) for at, size in samples if at - samples[0][0] >= FIRST_SECONDS]
            if len(late) >= SAMPLES:
                at, size = np.array(late).T
                slopes[role].append(float(np.polyfit(at / 3600, size / 2**20, 1)[0]))
        return {
            role: {"processes": len(each), "median": statistics.median(each), "largest": max(each)}
            for role, each in sorted(slopes.items())
        }

    def _wait(self, condition: Callable[[], bool], limit: float) -> bool:
        """Look until the condition holds (True) or the command has ended (False)."""
        deadline = time.monotonic() + limit
        while self.process.poll() is None:
            self._read()
            if condition():
                return True
            self._sample_when_due()
            if time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the run stands still for {limit:g} s at step {self._standing()}; see {self.log}")
            time.sleep(LOOK_SECONDS)
        return False

    def _read(self) -> None:
        with suppress(FileNotFoundError), self.folder.metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = json.loads(line)
                if "timing_s/step" in record or "marker" in record:
                    self._steps.append(record)

    def _made(self) -> int:
        return sum("marker" not in record for record in self._steps)

    def _standing(self) -> int:
        return max((record["step"] for record in drop_superseded(self._steps)), default=0)

    def _sample_when_due(self) -> None:
        if time.monotonic() - self._sampled_at >= SAMPLE_SECONDS:
            self.sample()

    def sample(self) -> None:
        """Note every process of the run and its memory."""
        self._sampled_at = now = time.monotonic()
        with suppress(psutil.Error):
            command = psutil.Process(self.process.pid)
            self.handles.append((now, command.num_fds()))
            for process in [command, *command.children(recursive=True)]:
                with suppress(psutil.Error):
                    self.seen[process.pid] = process
                    role = _role(process)
                    _, samples = self.memory.setdefault(process.pid, (role, []))
                    samples.append((now - self._began, process.memory_info().rss))

    def newest(self, title: str) -> psutil.Process | None:
        """The newest process of the run that has this in its title or its command line."""
        found = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    self.seen[process.pid] = process
                    if title in _title(process):
                        found.append((process.create_time(), process.pid, process))
        return max(found)[2] if found else None


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "gone"


def _role(process: psutil.Process) -> str:
    title = _title(process)
    found = next((role for role, part in TITLES.items() if part in title), None)
    if found is not None:
        return found
    return "pods train" if "pods_cluster.client.cli" in title else "Ray"


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def schedule_of(
    steps: int, every: int, seed: int, kinds: Sequence[tuple[str, signal.Signals]] = KINDS
) -> list[tuple[int, str, signal.Signals]]:
    """A fault each `every` steps: all kinds in turn, each round in an order of its own."""
    draw, left, found = random.Random(seed), list[tuple[str, signal.Signals]](), []
    for step in range(every, steps - 1, every):
        if not left:
            left = draw.sample(list(kinds), len(kinds))
        found.append((step, *left.pop()))
    return found


def soak(
    folder: Path,
    overrides: Sequence[str],
    *,
    steps: int,
    every: int,
    seed: int = 0,
    baseline: bool = False,
    kinds: Sequence[tuple[str, signal.Signals]] = KINDS,
    limit: float = 600.0,
) -> dict[str, Any]:
    """Run with faults, and without if `baseline`; what came out."""
    shared = set(os.listdir("/dev/shm"))
    settings = [*overrides, f"run.steps={steps}"]
    weights: dict[str, bytes] = {}
    if baseline:
        Soak(folder, "baseline", settings).end(limit * steps)
        weights["baseline"] = (folder / "baseline" / "model" / "model.safetensors").read_bytes()
    run = Soak(folder, "soak", settings)
    began = time.monotonic()
    faults = run.faults(schedule_of(steps, every, seed, kinds), limit)
    code = run.end(limit * steps)
    seconds = time.monotonic() - began
    result: dict[str, Any] = {
        "machine": machine(),
        "steps": steps,
        "every": every,
        "seed": seed,
        "exit_code": code,
        "seconds": seconds,
        "steps_recorded": len({record["step"] for record in run.folder.read_metrics() if "timing_s/step" in record}),
        "steps_made": run._made(),
        "restarts": sum(event["kind"] == "restarting" for event in run.folder.read_events()),
        "memory_growth_mib_per_hour": run.growth(),
        "handles_of_the_command": {"first": run.handles[0][1], "last": run.handles[-1][1]} if run.handles else {},
        "processes_left": run.leftovers(),
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shared),
        "faults": table(faults, ("step", "role", "signal", "seconds")),
    }
    result["reward_at_the_end"] = {"soak": _last_reward(run.folder)}
    if baseline:
        result["reward_at_the_end"]["baseline"] = _last_reward(RunFolder(folder / "baseline"))
        if all(role in EXACT for role, _ in kinds):
            result["same_weights"] = weights["baseline"] == (run.folder.model / "model.safetensors").read_bytes()
    return result


def _last_reward(folder: RunFolder) -> float:
    """Mean reward of the last tenth of the steps, at least of five."""
    rewards = [record["reward"] for record in folder.read_metrics() if record.get("reward") is not None]
    return statistics.fmean(rewards[-max(5, len(rewards) // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--stops", action="store_true", help="hung processes too, each half a minute and more")
    parser.add_argument("--baseline", action="store_true", help="the same run without faults, to compare the weights")
    parser.add_argument("--exact", action="store_true", help="only faults that leave no trace in the weights")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*", help="key=value, as in model.path=…")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(
            Path(folder),
            arguments.overrides,
            steps=arguments.steps,
            every=arguments.every,
            seed=arguments.seed,
            baseline=arguments.baseline,
            kinds=[
                (role, number)
                for role, number in (KINDS + STOPS if arguments.stops else KINDS)
                if role in EXACT or not arguments.exact
            ],
        )
    write_result(arguments.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "faults"}, indent=1, default=str))


if __name__ == "__main__":
    main()
