"""A run found by its folder or its name, and its controls on the Ray cluster where it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pods_cluster.client.controls import ControlFailed, LiveStatus, NotLive
from pods_cluster.client.ray_controls import RayControls
from pods_cluster.client.run_state import read_run_state
from pods_cluster.run.checkpoints import latest
from pods_cluster.run.live_file import living_process, read_live_file
from pods_cluster.run.ray_access import use_ray_token
from pods_cluster.telemetry.run_folder import RunFolder

POLL_SECONDS = 0.5
T = TypeVar("T")


class RunAccessError(Exception):
    """A run was not found, is not alive, or is not in the wanted state in time; the text says what to do."""


@dataclass(slots=True)
class RunHandle:
    """A run: its name, its folder where that is on this machine, and the address of its Ray cluster where known."""

    name: str
    folder: RunFolder | None
    address: str | None

    @property
    def controls(self) -> RayControls:
        """Raises RunAccessError where it is known that the run is not alive."""
        if self.folder is not None and living_process(self.folder) is False:
            raise RunAccessError(f"{self.folder.path}: the run was killed; continue it with `pods train … --resume`")
        if self.address is None:
            where = self.folder.path if self.folder is not None else self.name
            if self.folder is not None and read_run_state(self.folder, self.name).status == "finished":
                raise RunAccessError(
                    f"{where}: the run is not alive, it has finished; more steps: `pods train … run.steps=… --resume`"
                )
            raise RunAccessError(f"{where}: the run is not alive; continue it with `pods train … --resume`")
        use_ray_token()
        return RayControls(self.address)

    def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer of one call to the controls. Raises NotLive and ControlFailed."""
        return asyncio.run(question)

    def wait_for_sizes(self, seconds: float) -> LiveStatus:
        """Wait until no change of the pools is under way. Raises RunAccessError at the deadline, NotLive if the run ends."""
        controls, deadline = self.controls, time.monotonic() + seconds
        while True:
            status = self.ask(controls.status(self.name))
            if status.note is None:
                return status
            if time.monotonic() > deadline:
                raise RunAccessError(f"{self.name}: after {seconds:g} s still: {status.note}; the request stands")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, seconds: float) -> Path | None:
        """Wait until the run has ended; its newest checkpoint, where its folder is here. Raises RunAccessError."""
        controls, deadline = self.controls, time.monotonic() + seconds
        while True:
            with contextlib.suppress(ControlFailed):  # busy with saving: asked again
                try:
                    self.ask(controls.status(self.name))
                except NotLive:
                    return latest(self.folder.checkpoints) if self.folder is not None else None
            if time.monotonic() > deadline:
                raise RunAccessError(
                    f"{self.name}: has not ended after {seconds:g} s; it has the request to stop, and is saving its state"
                )
            time.sleep(POLL_SECONDS)


def find_run(target: str, address: str | None = None, root: Path = Path("runs")) -> RunHandle:
    """A run by its folder, or by its name: in `root`, or on the cluster at `address`. Raises RunAccessError."""
    for path in (Path(target).expanduser(), root / target):
        if (path / "config.yaml").is_file():
            folder = RunFolder.open(path)
            return RunHandle(folder.name, folder, address or _address_in(folder))
    if address is None or "/" in target:
        raise RunAccessError(
            f"{target}: is not the folder of a run, and {root} holds no run of this name; give its folder, or --address "
            f"of the Ray cluster on which it is alive"
        )
    return RunHandle(target, None, address)


def controls_of(paths: Sequence[Path], address: str | None = None) -> RayControls:
    """Controls of the live runs in these folders, each on the cluster that its `live.json` names, or on `address`."""
    use_ray_token()

    def cluster_of(run: str) -> str | None:
        for path in paths:
            for folder in (path, path / run):
                if folder.name == run and (folder / "config.yaml").is_file():
                    return _address_in(RunFolder.open(folder))
        return None

    return RayControls(address or cluster_of)


def live_runs(address: str) -> list[str]:
    """Names of the runs that are alive on a cluster. Raises NotLive."""
    use_ray_token()
    return asyncio.run(RayControls(address).runs(address))


def _address_in(folder: RunFolder) -> str | None:
    values = read_live_file(folder)
    return values["address"] if values else None
