"""Faults that are done to a run while it goes on: a thread waits for a step and does them, and measures how long it takes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from pods_cluster.actor_names import NAMESPACE, actor_name
from pods_cluster.telemetry.step_record import drop_superseded

Fault = Callable[[str], None]
"""Does something to the run of this name."""


def pid_of(run: str, role: str) -> int:
    """The process of the run's newest actor in a role."""
    there: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in there if actor["name"].startswith(f"{run}/{role}/")]
    name = max(names, key=lambda name: int(name.rsplit("/", 1)[1]))
    handle: Any = ray.get_actor(name, namespace=NAMESPACE)
    return ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60)


def send(role: str, number: signal.Signals) -> Fault:
    """A signal to the process of the newest actor in a role."""

    def fault(run: str) -> None:
        if role == "learner":  # its calls run one at a time
            controller: Any = ray.get_actor(actor_name(run, "controller"), namespace=NAMESPACE)
            status: Any = ray.get(controller.status.remote(), timeout=60)
            pid = [worker.pid for worker in status.workers if worker.role == "learner"][-1]
        else:
            pid = pid_of(run, role)
        os.kill(pid, number)

    return fault


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Faults(threading.Thread):
    """Does each fault once its step is recorded, and waits for a later one; `seconds` until that, of each."""

    def __init__(self, folder: Path, faults: Sequence[tuple[int, Fault]], *, seconds: float = 200) -> None:
        super().__init__(daemon=True)
        self._folder, self._faults, self._limit = folder, list(faults), seconds
        self.seconds: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for step, fault in self._faults:
                self._wait(lambda step=step: self._made() >= step)
                fault(self._folder.name)
                began, there = time.monotonic(), self._lines()
                self._wait(lambda there=there: self._lines() > there + 1)  # a step whose numbers came late is one more
                self.seconds.append(time.monotonic() - began)
        except BaseException as error:
            self.error = error

    def result(self) -> list[float]:
        """Seconds from each fault to the next but one step, once all are done. Raises what went wrong with them."""
        self.join(5)
        if self.error is not None:
            raise self.error
        assert len(self.seconds) == len(self._faults), "the run ended before all faults were done"
        return self.seconds

    def _steps(self) -> list[dict[str, Any]]:
        return [line for line in lines(self._folder / "metrics.jsonl") if "timing_s/step" in line or "marker" in line]

    def _made(self) -> int:
        return max((line["step"] for line in drop_superseded(self._steps())), default=0)

    def _lines(self) -> int:
        return sum("marker" not in line for line in self._steps())

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._limit
        while not condition():
            assert time.monotonic() < deadline, f"{self._folder.name}: waited {self._limit:g} s in vain"
            time.sleep(0.02)
