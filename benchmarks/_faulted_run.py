"""A `pods train` of its own whose parts are killed and stopped from outside, while its processes are watched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks._run_processes import TITLES, ProcessWatch
from pods_cluster.client.demo import CONFIG
from pods_cluster.telemetry.run_folder import RunFolder
from pods_cluster.telemetry.step_record import drop_superseded
from tests.warm_workers import Server

LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """Harm done to a part of a run. `stop` leaves a process that hangs, `end` is SIGTERM; with `all` the whole pool."""

    role: str
    does: Literal["kill", "stop", "end"] = "kill"
    all: bool = False

    @property
    def signal(self) -> signal.Signals:
        return {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}[self.does]

    def __str__(self) -> str:
        done = {"kill": "killed", "stop": "stopped", "end": "ended"}[self.does]
        return f"{'every ' if self.all else ''}{self.role} {done}"


class FaultedRun:
    """One `pods train`, what is done to it, and how its processes grow.

    `minutes`: it is ended by SIGTERM then, or once it goes on after the fault under way. Runs `beside` are watched meanwhile.
    `warm`: its workers are forks of a process that has imported torch, transformers and DeepSpeed (`tests/warm_workers.py`).
    """

    def __init__(
        self, folder: Path, name: str, overrides: Sequence[str], *, minutes: float | None = None, warm: bool = False
    ) -> None:
        self._warm = Server(at_once=True) if warm else None
        self.folder = RunFolder(folder / name)
        self.log = folder / f"{name}.log"
        self._settings = [*overrides, f"run.dir={folder}", f"run.name={name}", "cluster.address=local"]
        self._began = time.monotonic()
        self._ends_at = None if minutes is None else self._began + 60 * minutes
        self.ended_early = False
        self.beside: list[FaultedRun] = []
        self.watch = ProcessWatch(self._family, lambda: self.seconds)
        self._steps: list[dict[str, Any]] = []
        self._offset = 0
        self.exit_codes: list[int] = []
        """Of the command, each time that it ended."""
        self.process = self._start()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pods_cluster.client.cli", "train", "--plain", *options, str(CONFIG)]
        with self.log.open("ab") as log:
            environment = None if self._warm is None else self._warm.environment
            return subprocess.Popen([*command, *self._settings], stdout=log, stderr=subprocess.STDOUT, env=environment)

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._began

    @property
    def alive(self) -> bool:
        """Whether the command goes on."""
        return self.process.poll() is None

    @property
    def made(self) -> int:
        """Steps that were made so far, those that were made again counted again."""
        return sum("marker" not in record for record in self._steps)

    @property
    def standing(self) -> int:
        """The newest step of the run as it stands."""
        return max((record["step"] for record in drop_superseded(self._steps)), default=0)

    def do(self, fault: Fault, limit: float) -> dict[str, Any] | None:
        """Do a fault and wait for the second step after it; what it cost, None where there is no such process.

        Raises RuntimeError when the run stands still for `limit` seconds.
        """
        victims = self.processes(TITLES[fault.role])
        if not victims:
            return None
        self._read()
        step, there = self.standing, self.made
        for victim in victims if fault.all else victims[-1:]:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(fault.signal)
        began, resumed = time.monotonic(), False

        def goes_on() -> bool:
            if fault.role == "command" or self.made <= there + 1:
                return False
            # steps need no GCS, but the next restart does
            return fault.role != "gcs" or any(each not in victims for each in self.processes(TITLES["gcs"]))

        on = self._wait(goes_on, limit, to_its_end=True)
        if fault.role == "command" or (
            not on and self.process.returncode
        ):  # it ended, rightly or not: as a user goes on
            self.exit_codes.append(self.process.wait())
            self._read()
            before, resumed = self.made, True
            self.process = self._start("--resume")
            on = self._wait(lambda: self.made > before + 1, limit, to_its_end=True)
        return {
            "step": step,
            "fault": str(fault),
            "seconds": time.monotonic() - began if on else None,
            "steps_again": self.made - there - (self.standing - step),
            "resumed": resumed,
        }

    def wait_for_step(self, step: int, limit: float) -> bool:
        """Wait until the run has made this step; false where the command has ended before."""
        return self._wait(lambda: self.standing >= step, limit)

    def end(self, limit: float) -> int:
        """Wait for the end of the command; its exit code."""
        self._wait(lambda: False, limit)
        self.exit_codes.append(self.process.wait())
        return self.exit_codes[-1]

    def kill(self) -> None:
        """Kill the command, if it goes on, and start no more."""
        if self.alive:
            self.process.kill()
            self.process.wait()
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def _wait(self, condition: Callable[[], bool], limit: float, *, to_its_end: bool = False) -> bool:
        """Look until the condition holds (True) or the command has ended (False); `to_its_end`: whatever `minutes` says."""
        deadline = time.monotonic() + limit
        while self.alive:
            self._read()
            if condition() and not self.ended_early:
                return True
            for run in (self, *self.beside):
                run.watch.sample_when_due()
            now = time.monotonic()
            if self._ends_at is not None and now > self._ends_at and not (self.ended_early or to_its_end):
                self.ended_early = True
                self.process.terminate()
            if now > deadline:
                self.kill()
                raise RuntimeError(f"the run stands still for {limit:g} s at step {self.standing}; see {self.log}")
            time.sleep(LOOK_SECONDS)
        self._read()
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

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Processes of the run that have this in their title or their command line, the newest last."""
        return self.watch.processes(title)

    def _family(self) -> list[psutil.Process]:
        """The command and all that descends from it, or was forked for it."""
        found: list[psutil.Process] = []
        with suppress(psutil.Error):
            command = psutil.Process(self.process.pid)
            found += [command, *command.children(recursive=True)]
        if self._warm is not None:
            with suppress(psutil.Error):
                found += psutil.Process(self._warm.process.pid).children(recursive=True)
        return found
