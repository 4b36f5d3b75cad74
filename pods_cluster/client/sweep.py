"""`pods sweep`: runs the arms of a sweep, each a process of its own, some at a time; what is done is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pods_cluster.client.lanes import Lane
from pods_cluster.client.paths import absolute, run_folder
from pods_cluster.client.refusals import check_names, outlasting_process, why_finished
from pods_cluster.client.run_state import RunState, read_run_state
from pods_cluster.config import Config, ConfigError, dump_config, parse_config
from pods_cluster.config.sweep import Sweep, SweepRun
from pods_cluster.telemetry.line_tail import newest
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.settings import differing

SWEEP_FILE = "sweep.yaml"
"""The file in a sweep's folder from which `pods compare` knows its arms."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 900.0
"""How long stopping runs may take to save their states before they are killed."""
KILL_SECONDS = 20.0
# They change how long a run is or where it computes, and nothing of what it has computed so far.
_MAY_CHANGE = ("run.steps", "run.max_seconds", "run.checkpoint.", "run.samples_", "run.step_timeout", "cluster.")


@dataclass(slots=True)
class Job:
    """A run of the sweep and where it stands: `waiting`, `running`, `finished`, `stopped` or `failed` (with `why`)."""

    run: SweepRun
    folder: RunFolder
    state: str = "waiting"
    why: str = ""
    process: subprocess.Popen[bytes] | None = None
    seen: RunState | None = None
    accuracy: float | None = None
    lane: Lane | None = None

    def look(self) -> None:
        """Read from the run's folder how far it is."""
        if self.folder.config.is_file():
            self.seen = read_run_state(self.folder, self.run.name)
            found = newest(self.folder.metrics, lambda line: isinstance(line.get("eval/greedy_accuracy"), float | int))
            self.accuracy = float(found["eval/greedy_accuracy"]) if found else None


def prepare(sweep: Sweep) -> list[Job]:
    """All runs of the sweep with what is done of them. Raises ConfigError with every problem of every run at once:
    rules and rewards that are not there, a run that is alive, or one that was begun with other settings.
    """
    jobs, problems, checked = [], [], {}
    for run in sweep.runs:
        folder = RunFolder(run_folder(run.config.run.dir) / run.name)
        arm = run.arm
        if arm not in checked:
            checked[arm] = None
            try:
                check_names(run.config)
            except ConfigError as error:
                problems.append(f"arm {arm}: {error}")
        job = Job(run, folder)
        if folder.path.exists() and not folder.config.is_file() and any(folder.path.iterdir()):
            problems.append(f"{folder.path}: holds files that are no run; remove it, or give the sweep another name")
        elif folder.config.is_file():
            problems += _cannot_go_on(run.config, folder)
            if why_finished(run.config, folder):
                job.state = "finished"
                job.look()
        jobs.append(job)
    if problems:
        raise ConfigError.listing(f"sweep {sweep.config.name}", problems)
    return jobs


def _cannot_go_on(config: Config, folder: RunFolder) -> list[str]:
    if process := outlasting_process(folder):
        return [f"{folder.path}: is alive (process {process}); wait for it, or end it with `pods stop {folder.path}`"]
    try:  # read as a configuration, so that a field that is new since then has its default there
        begun = parse_config(folder.config.read_text(encoding="utf-8"), source=str(folder.config))
    except ConfigError as error:
        return [
            f"{folder.path}: its configuration is none of this version ({error}); remove it, or name the sweep anew"
        ]
    both = [begun.model_dump(mode="json"), absolute(config).model_dump(mode="json")]
    changed = {name: values for name, values in differing(both).items() if not name.startswith(_MAY_CHANGE)}
    if not changed:
        return []
    what = ", ".join(f"{name}: {old!r}, now {new!r}" for name, (old, new) in list(changed.items())[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [f"{folder.path}: was begun with {what}{more}; give the sweep another name, or remove the folder"]


def write_sweep_file(sweep: Sweep) -> Path:
    """Write the arms and their runs into the sweep's folder, for `pods compare`. Raises OSError."""
    folder = run_folder(sweep.runs[0].config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SWEEP_FILE
    arms = {arm: [run.name for run in runs] for arm, runs in sweep.arms.items()}
    if path.is_file():  # of these arms some may have been left for another time
        earlier = yaml.safe_load(path.read_text(encoding="utf-8")).get("arms", {})
        arms = {arm: list(dict.fromkeys([*earlier.get(arm, []), *arms.get(arm, [])])) for arm in {**earlier, **arms}}
    content = {
        "name": sweep.config.name,
        "baseline": sweep.config.baseline_arm,
        "metric": sweep.config.metric,
        "target": sweep.config.target,
        "gain": sweep.config.gain,
        "share": sweep.config.share,
        "arms": arms,
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


class Runner:
    """Starts the jobs that fit, watches them, and ends them when it is told to."""

    def __init__(
        self,
        jobs: list[Job],
        at_once: int,
        room: Mapping[str, float],
        environment: Mapping[str, str],
        lanes: Sequence[Lane] = (),
    ) -> None:
        """`room`: CPUs and GPUs of the cluster, by Ray's names; jobs beyond `at_once` or that room wait. `lanes`: each run
        has one of these to itself, and no room is looked at."""
        self.jobs, self.at_once, self.room = jobs, at_once, dict(room)
        self.lanes = tuple(lanes)
        self._environment = {**os.environ, **environment}
        self._stopping_since: float | None = None
        self._signals = 0

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.state == "running"]

    @property
    def over(self) -> bool:
        waiting = any(job.state == "waiting" for job in self.jobs) and self._stopping_since is None
        return not self.running and not waiting

    def step(self) -> None:
        """Take note of what ended, and start what fits."""
        for job in self.running:
            assert job.process is not None
            code = job.process.poll()
            if code is None:
                continue
            job.look()
            if why_finished(job.run.config, job.folder):
                job.state = "finished"
            elif self._stopping_since is not None:
                job.state = "stopped"
            else:
                job.state = "failed" if code else "stopped"
                job.why = _last_lines(log_of(job.run)) if code else "it was stopped from outside"
        if self._stopping_since is not None:
            if time.monotonic() - self._stopping_since > STOP_SECONDS:
                self.kill()
            return
        for job in self.jobs:
            if job.state == "waiting" and len(self.running) < self.at_once and self._fits(job.run.config):
                self._start(job)

    def stop(self) -> None:
        """Have every run save its state and end; no other is started. A second call ends them at once."""
        self._signals += 1
        self._stopping_since = self._stopping_since or time.monotonic()
        for job in self.running:
            if job.process is not None and job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End what still runs, and wait for it."""
        for job in self.running:
            assert job.process is not None
            job.process.kill()
            job.process.wait(KILL_SECONDS)
            job.state, job.why = "failed", "it was killed: it did not end when it was told to"

    def _free_lane(self) -> Lane | None:
        taken = [job.lane for job in self.running]
        return next((lane for lane in self.lanes if lane not in taken), None)

    def _fits(self, config: Config) -> bool:
        if self.lanes:
            return self._free_lane() is not None
        from pods_cluster.run.cluster import Demand

        taken = [Demand.of(job.run.config, self.room.get("GPU", 0.0)) for job in self.running]
        if not taken:
            return True  # what does not fit alone says so itself
        asked = Demand.of(config, self.room.get("GPU", 0.0))
        cpus, gpus = sum(each.cpus for each in taken), sum(each.gpus for each in taken)
        return (
            cpus + asked.cpus <= self.room.get("CPU", 0.0) + 1e-6
            and gpus + asked.gpus <= self.room.get("GPU", 0.0) + 1e-6
        )

    def _start(self, job: Job) -> None:
        config_file, log = config_of(job.run), log_of(job.run)
        for path in (config_file, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        config_file.write_text(dump_config(job.run.config), encoding="utf-8")
        resume = ["--resume"] if job.folder.config.is_file() else []
        lane = job.lane = self._free_lane()
        cores = ",".join(map(str, lane.cores)) if lane else ""
        command = [
            sys.executable,
            "-m",
            "pods_cluster.client.sweep_run",
            str(os.getpid()),
            cores,
            str(config_file),
            *resume,
        ]
        environment = self._environment | (lane.environment() if lane else {})
        with log.open("ab") as output:
            # a session of its own: the terminal's Ctrl-C comes to the sweep alone, which passes it on
            job.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        job.state = "running"


def config_of(run: SweepRun) -> Path:
    """The configuration that a run is started with, by `pods train` too."""
    return run_folder(run.config.run.dir) / "configs" / f"{run.name}.yaml"


def log_of(run: SweepRun) -> Path:
    """The file with the output of a run's `pods train`."""
    return run_folder(run.config.run.dir) / "logs" / f"{run.name}.log"


def _last_lines(log: Path, lines: int = 3) -> str:
    """The error that a command ended with."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "its log cannot be read"
    found = text.splitlines()
    start = next((at for at in range(len(found) - 1, -1, -1) if found[at].startswith("error:")), len(found) - lines)
    return " ".join(" ".join(found[max(start, 0) :][:lines]).split()) or f"it said nothing; see {log}"


def runs_at_once(sweep: Sweep, resources: Mapping[str, Any], cores: int) -> int:
    """`parallel` of the sweep as a number: `auto` counts the largest run against the cluster's CPUs (of a local cluster the
    machine's cores, since its slots are no cores) and GPUs.
    """
    from pods_cluster.run.cluster import Demand

    if sweep.config.parallel != "auto":
        return sweep.config.parallel
    gpus = float(resources.get("GPU", 0.0))
    demands = [Demand.of(runs[0].config, gpus) for runs in sweep.arms.values()]
    fits = [int((cores + 1e-6) // max(demand.cpus, 1e-6)) for demand in demands]
    fits += [int((gpus + 1e-6) // demand.gpus) for demand in demands if demand.gpus]
    return max(1, min(fits))
